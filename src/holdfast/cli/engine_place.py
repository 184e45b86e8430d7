"""A worker's launch settings as its engine's place beside a vault."""

from __future__ import annotations

from holdfast.cli.launch import WorkerLaunch
from holdfast.engines.shadow.place import Place


def place_of(launch: WorkerLaunch) -> Place:
    return Place(
        launch.vault_socket,
        launch.device,
        launch.engine_id,
        who=launch.name,
        unmapped=launch.standby == "unmapped",
        direct=launch.kv == "direct",
        wake_s=launch.wake_s,
        load_s=launch.load_s,
        vault_uids=launch.vault_uids,
        more=launch.more_vaults,
    )
