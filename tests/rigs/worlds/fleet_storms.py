"""Random worlds by their seeds: nodes come and go, models of many sizes are wanted and not, replicas crash, messages
and replies are lost, snapshots come late, controllers start again. Then it is quiet, and all must come to rest.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import structs

from holdfast.fleet.actions import Action
from holdfast.fleet.desired import Cordon, Level, Model
from holdfast.fleet.observed import Health, ReplicaPhase
from holdfast.fleet.room import HOST
from holdfast.fleet.view import FleetView
from holdfast.health.replacement import DOUBT_S
from tests.rigs.worlds.fleet import World
from tests.rigs.worlds.fleet_node import Body, Machine

STEPS = 40
QUIET_STEPS_MAX = 400  # back-offs of five minutes and an hour of time-outs are passed in leaps
ILL_S = 120.0  # longer than any replica may be ill here before it is replaced
COMPARED = 7  # one pass in so many is planned from scratch as well


class Storm:
    """One world, its weather, and what is promised whatever the weather."""

    events: ClassVar[list[str]] = []  # that befall it
    machines_max, models_max, devices = 5, 6, (1, 1, 2, 4)

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = self.begun()
        self.late: list[tuple[float, Action]] = []  # messages on their way
        for number in range(self.rng.randint(1, self.machines_max)):
            self.add_machine(f"n{number}")
        for number in range(self.rng.randint(1, self.models_max)):
            self.want(self.model(f"m{number}"))

    def begun(self) -> Any:
        return World()

    def want(self, model: Model) -> None:
        self.world.want(model)

    def add_machine(self, name: str) -> None:
        rng = self.rng
        totals = {f"gpu{device}": rng.choice((40, 80, 80)) for device in range(rng.choice(self.devices))}
        self.world.add(Machine(name, {**totals, HOST: rng.choice((0, 60, 150))}, keeps_memory=rng.random() < 0.3))

    def model(self, key: str) -> Model:
        rng, most = self.rng, self.rng.randint(1, 4)
        floor, size = rng.choice((Level.COLD, Level.COLD, Level.WARM, Level.HOT)), rng.choice((8, 16, 30, 40, 70))
        return Model(
            key=key,
            version=rng.choice("ab"),
            replicas_min=rng.randint(0, most),
            replicas_max=most,
            wanted=rng.randint(0, most),
            floor=floor,
            dedicated=rng.random() < 0.2,
            nodes=self.pinned(),
            per_node_max=rng.choice((0, 0, 0, 1, 2)),
            devices=rng.choice((1, 1, 1, 2)),
            device_bytes=size,
            host_bytes=rng.choice((size, size, size // 2, size if floor is Level.WARM else 0)),
            load_s=rng.choice((15.0, 60.0)),
            drain_s=rng.choice((0.0, 5.0, 20.0)),
        )

    def pinned(self) -> frozenset[str]:
        """Mostly anywhere; else on one or two nodes, of which one may never come."""
        if self.rng.random() >= 0.2:
            return frozenset()
        return frozenset(self.rng.sample([*sorted(self.world.machines), "n9"], self.rng.choice((1, 1, 2))))

    def run(self) -> Counter[str]:
        for step in range(STEPS):
            self.world.now_s += self.rng.choice((0.5, 2.0, 5.0, 20.0))
            for _ in range(self.rng.choice((0, 0, 0, 1, 2))):
                getattr(self, f"befall_{self.rng.choice(self.events)}")()
            self.traffic()
            self.pass_once(step % COMPARED == 0, 0.15)
        self.calm_down()
        counts: Counter[str] = self.world.counts
        return counts

    def pass_once(self, compared: bool, lost: float) -> tuple[Action, ...]:
        world, rng = self.world, self.rng
        world.tick()
        for machine in world.machines.values():
            if rng.random() >= lost:
                world.look(machine)
        actions: tuple[Action, ...] = world.plan(compared=compared)
        for action in actions:
            if rng.random() < lost / 3:
                continue  # the controller dies between: it was never asked for
            world.ask(action)
            if rng.random() >= lost:
                self.late.append((world.now_s + (rng.choice((0.0, 0.0, 2.0, 30.0)) if lost else 0.0), action))
        for at_s, action in [one for one in self.late if one[0] <= world.now_s]:
            self.late.remove((at_s, action))
            world.send(action, fails=rng.random() < lost, reply_lost=rng.random() < lost)
            if rng.random() < lost:
                world.send(action)  # twice
        return actions

    def traffic(self) -> None:
        for key in self.world.models:
            if self.rng.random() < 0.2:
                self.world.ask_for(key, self.rng.randint(0, 3))
        for machine in self.world.machines.values():
            for body in machine.bodies.values():
                if body.serves and body.is_sound and self.rng.random() < 0.3:
                    body.running, body.idle_s, machine.changed = body.running + 1, 0.0, True
                elif body.running and self.rng.random() < 0.3:
                    body.running, machine.changed = body.running - 1, True
                    body.idle_s = self.world.now_s if body.running == 0 else 0.0

    # -- what befalls it

    def befall_crash(self) -> None:
        machine = self.rng.choice(list(self.world.machines.values()))
        if machine.bodies:
            machine.crash(self.rng.choice(list(machine.bodies)))

    def befall_reboot(self) -> None:
        self.rng.choice(list(self.world.machines.values())).reboot()

    def befall_smaller(self) -> None:
        """It starts again with less memory: on a device, or in its host."""
        machine = self.rng.choice(list(self.world.machines.values()))
        machine.reboot()
        machine.shrank = True
        machine.totals[self.rng.choice(list(machine.totals))] //= 2

    def cut_off(self) -> Machine:
        """A machine is not reached for a while, or is dead."""
        machine: Machine = self.rng.choice(list(self.world.machines.values()))
        machine.near = False
        if self.rng.random() < 0.5:
            machine.up = False
            machine.reboot()
        return machine

    def befall_away(self) -> None:
        """It is noticed at once, or not."""
        machine = self.cut_off()
        if self.rng.random() < 0.7:
            self.world.planner.view.mark_lost(machine.name)

    def befall_back(self) -> None:
        for machine in self.world.machines.values():
            machine.up = machine.near = machine.changed = True

    def befall_new_node(self) -> None:
        if len(self.world.machines) <= self.machines_max:
            self.add_machine(f"n{len(self.world.machines)}")

    def befall_deploy(self) -> None:
        self.want(self.model(f"m{self.rng.randint(0, self.models_max)}"))

    def befall_scale(self) -> None:
        if self.world.models:
            model = self.rng.choice(list(self.world.models.values()))
            self.want(structs.replace(model, wanted=self.rng.randint(0, model.replicas_max)))

    def befall_evict(self) -> None:
        """A person sends one replica away, and one fewer is wanted, or not."""
        there = [body.action for _, body in self.world.bodies() if body.action.model in self.world.models]
        if there:
            action = self.rng.choice(there)
            model = self.world.models[action.model]
            wanted = model.wanted - (model.wanted > 0 and self.rng.random() < 0.3)
            self.world.want(structs.replace(model, going=model.going | {action.serial}, wanted=wanted))

    def befall_remove(self) -> None:
        if self.world.models:
            self.world.unwant(self.rng.choice(list(self.world.models)))

    def befall_restart(self) -> None:
        self.world.restart()

    # -- then it is quiet

    def calm_down(self) -> None:
        """No more faults and no more requests: it comes to rest, at what is wanted as far as there is room."""
        world = self.world
        self.befall_back()
        self.late.clear()
        for key in list(world.waiting):
            world.ask_for(key, 0)
        self.end_requests()
        for step in range(QUIET_STEPS_MAX):
            actions = self.pass_once(step % COMPARED == 0, 0.0)
            world.counts["quiet steps"] += 1
            if not actions and self.is_at_rest():
                break
            world.now_s = world.next_s() if not actions else world.now_s + 0.1
        else:
            raise AssertionError(f"it does not come to rest: {world.last} {world.planner!r}")
        for model in world.models.values():
            self.check(model)
            self.check_floor(model)

    def end_requests(self) -> None:
        for machine in self.world.machines.values():
            for body in machine.bodies.values():
                body.running, body.idle_s = 0, self.world.now_s

    @property
    def view(self) -> FleetView:
        found: FleetView = self.world.planner.view
        return found

    @property
    def unmet(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.world.last.unmet
        return found

    def is_at_rest(self) -> bool:
        world, view = self.world, self.view
        moving = any(body.phase is not ReplicaPhase.READY for _, body in world.bodies())
        backing_off = any(tries.retry_at_s > world.now_s for tries in view.tries.values())
        young = any(body.serves and world.now_s < body.since_s + 60.0 for _, body in world.bodies())
        return not (moving or view.pending or backing_off or young)

    def ready(self, model: Model) -> list[Body]:
        """Return the replicas of a model that count: at their level, and in good health."""
        bodies = [body for _, body in self.world.bodies() if body.action.model == model.key]
        return [body for body in bodies if body.phase is ReplicaPhase.READY and body.is_sound]

    def check(self, model: Model) -> None:
        """As many serve as are wanted, of the right version; if not, no node has room for one more."""
        there = [body for body in self.ready(model) if body.serves]
        told = f"{model.key}: {len(there)} of {model.hot} serve, {self.unmet}"
        assert len(there) <= model.hot, told
        if len(there) == model.hot and all(self.is_current(body, model) for body in there):
            return
        assert model.key in self.unmet, told
        for machine in self.open_machines():
            on = sum(body.serves and body.action.model == model.key for body in machine.bodies.values())
            fits = model.may_be_on(machine.name) and (not model.per_node_max or on < model.per_node_max)
            free = [total - sum(machine.leases[device].values()) for device, total in machine.totals.items() if device]
            roomy = sum(size >= model.device_bytes for size in free)
            assert not (fits and roomy >= model.devices), f"{told}, and {machine.name} has room: {free}"

    def check_floor(self, model: Model) -> None:
        """As many are HOT or WARM as are kept, of the right version; if not, no host has memory for one more beside a
        device with room, nor has one for whom others of another version would leave."""
        world, floor = self.world, model.floored
        there = self.ready(model)
        own, told = [body for body in there if self.is_current(body, model)], f"{model}: {world.last.unmet}"
        outdated = [body for body in there if body.level is Level.WARM and not self.is_current(body, model)]
        assert len(there) >= floor or model.key in world.last.unmet, told
        if len(own) >= floor:
            assert not outdated, told
            return
        assert model.key in world.last.unmet, told
        assert not any(body.action.serial in model.going for body in outdated), told
        for machine in self.open_machines():
            on = sum(body.serves and body.action.model == model.key for body in machine.bodies.values())
            fits = model.may_be_on(machine.name) and (not model.per_node_max or on < model.per_node_max)
            free = {device: total - sum(machine.leases[device].values()) for device, total in machine.totals.items()}
            host = free.pop(HOST) + sum(body.host_bytes for body in outdated if body.action.node == machine.name)
            roomy = sum(size >= model.device_bytes for size in free.values())
            fits &= roomy >= model.devices and host >= model.host_bytes
            assert not fits, f"{told}, and {machine.name} has room: {free} and {host}"

    def open_machines(self) -> list[Machine]:
        return [machine for name, machine in self.world.machines.items() if name not in self.world.cordons]

    def is_current(self, body: Body, model: Model) -> bool:
        is_own = body.action.version == model.version and body.action.serial not in model.going
        return is_own and not self.world.is_drained(body.action.node)


Storm.events = [name.removeprefix("befall_") for name in vars(Storm) if name.startswith("befall_")]
Storm.events += ["crash", "back", "scale"]  # more often than the others


class Rollouts(Storm):
    """Floors of WARM and HOT, whose models have another version again and again."""

    def add_machine(self, name: str) -> None:
        super().add_machine(name)
        machine = self.world.machines[name]
        machine.totals[HOST], machine.changed = self.rng.choice((60, 100, 150, 300)), True
        self.world.look(machine)

    def model(self, key: str) -> Model:
        model = super().model(key)
        least, floor = max(1, model.replicas_min), self.rng.choice((Level.WARM, Level.WARM, Level.WARM, Level.HOT))
        wanted = self.rng.choice((0, 0, model.wanted))
        host = model.host_bytes or model.device_bytes
        return structs.replace(model, floor=floor, replicas_min=least, wanted=wanted, host_bytes=host)

    def befall_version(self) -> None:
        if self.world.models:
            model = self.rng.choice(list(self.world.models.values()))
            self.world.want(structs.replace(model, version=self.rng.choice("abc")))


Rollouts.events = [*Storm.events, *["version"] * 8, "evict", "scale", "restart"]


class Ailing(Storm):
    """Replicas that are up and do not serve, for a while or for good: their engines end, or control takes their
    traffic."""

    def befall_ail(self) -> None:
        self.become(self.rng.choice((Health.AWAY, Health.DOUBTED, Health.DOUBTED, Health.UNFIT, Health.UNCHECKED)))

    def befall_heal(self) -> None:
        self.become(Health.SOUND)

    def pass_once(self, compared: bool, lost: float) -> tuple[Action, ...]:
        """As any storm does; where doubts lasted for long, control asks for another."""
        for machine in self.world.machines.values():
            for body in machine.bodies.values():
                if body.health is Health.DOUBTED and self.world.now_s >= body.ill_s + DOUBT_S:
                    body.become(Health.UNFIT, self.world.now_s)
                    machine.changed = True
        return super().pass_once(compared, lost)

    def become(self, health: Health) -> None:
        up = [(machine, body) for machine in self.world.machines.values() for body in machine.bodies.values()]
        up = [(machine, body) for machine, body in up if body.serves]
        for machine, body in self.rng.sample(up, min(len(up), self.rng.choice((1, 1, 2, 9)))):
            body.become(health, self.world.now_s)
            machine.changed = True

    def is_at_rest(self) -> bool:
        """Return True if nothing is left to do and no replica is still within its time to recover."""
        ill = [body for _, body in self.world.bodies() if body.serves and not body.is_sound]
        return super().is_at_rest() and not any(self.world.now_s < body.ill_s + ILL_S for body in ill)

    def check(self, model: Model) -> None:
        super().check(model)
        up = [body for _, body in self.world.bodies() if body.serves and body.action.model == model.key]
        told = f"{model.key} at rest: {up}, {self.world.last.unmet}"
        assert not any(body.health is Health.AWAY for body in up), told
        sound = sum(body.is_sound for body in up)
        assert sound < model.hot or sound == len(up), told
        assert len(up) <= model.hot + 1, told


Ailing.events = [*Storm.events, *["ail"] * 8, *["heal"] * 3, "scale", "restart"]


class Drains(Rollouts):
    """Nodes that are cordoned, drained and used again, there or not, beside all that befalls others."""

    def befall_drain(self) -> None:
        name = self.rng.choice([*self.world.machines, "n7"])
        self.world.cordon(name, Cordon(drain=self.rng.random() < 0.8))

    def befall_uncordon(self) -> None:
        if self.world.cordons:
            self.world.cordon(self.rng.choice(list(self.world.cordons)), None)

    def calm_down(self) -> None:
        """At rest a drained node has replicas only of models that fit nowhere else."""
        super().calm_down()
        world = self.world
        for name, body in world.bodies():
            if world.is_drained(body.action.node):
                world.counts["stay"] += 1
                assert body.action.model in world.models, f"{name} is of no model"
                assert body.action.model in world.last.unmet, f"{name} stays on {body.action.node}: {world.last.unmet}"
            elif body.phase is ReplicaPhase.READY and world.cordons:
                world.counts["elsewhere"] += 1


Drains.events = [*Storm.events, *["drain"] * 4, *["uncordon"] * 3, "version", "evict", "restart"]


def play(seed: int, kind: type[Storm] = Storm) -> Counter[str]:
    """One world; AssertionError says what was broken, and by which seed."""
    try:
        return kind(seed).run()
    except AssertionError as error:
        raise AssertionError(f"world {seed} of {kind.__name__}: {error}") from error
