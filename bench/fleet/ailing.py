"""Random worlds whose replicas fall ill: they are up and do not serve, and the planner must see it."""

from __future__ import annotations

from bench.fleet.storms import Storm
from holdfast.fleet.desired import Model
from holdfast.fleet.observed import Health

ILL_S = 120.0  # longer than any replica may be ill here before it is replaced


class Ailing(Storm):
    """Replicas that are up and do not serve, for a while or for good: their engines end, or control takes their
    traffic."""

    def befall_ail(self) -> None:
        self.become(self.rng.choice((Health.AWAY, Health.DOUBTED, Health.DOUBTED, Health.UNCHECKED)))

    def befall_heal(self) -> None:
        self.become(Health.SOUND)

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
