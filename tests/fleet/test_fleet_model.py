"""Whatever is wanted, crashes and gets lost: no vault is asked for more than it has, no work is cut short, nothing is
started twice, a plan made anew is the same plan; and when the world is quiet, it comes to rest.

What must never be is asserted by the world itself (fleet_node.py and fleet.py in `tests/rigs/worlds`), by what really
happens there.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from holdfast.fleet.actions import Action
from holdfast.fleet.desired import Cordon, Level, Model
from holdfast.fleet.room import HOST
from tests.rigs.worlds.fleet_node import Machine
from tests.rigs.worlds.fleet_storms import Storm

KEYS = st.sampled_from(["a", "b", "c"])
NODES = st.sampled_from(["n0", "n1", "n2"])
PICK = st.integers(0, 99)


@st.composite
def models(draw: st.DrawFn) -> Model:
    most, size = draw(st.integers(1, 3)), draw(st.sampled_from([10, 30, 40, 70]))
    return Model(
        key=draw(KEYS),
        version=draw(st.sampled_from("xy")),
        replicas_min=draw(st.integers(0, most)),
        replicas_max=most,
        wanted=draw(st.integers(0, most)),
        floor=draw(st.sampled_from(list(Level))),
        dedicated=draw(st.integers(0, 4)) == 0,
        nodes=draw(st.sampled_from([frozenset(), frozenset(), frozenset({"n0"})])),
        per_node_max=draw(st.sampled_from([0, 0, 1])),
        devices=draw(st.sampled_from([1, 1, 2])),
        device_bytes=size,
        host_bytes=size,
        load_s=20.0,
        drain_s=draw(st.sampled_from([0.0, 10.0])),
    )


class FleetModel(RuleBasedStateMachine):
    """A world and its controller."""

    def __init__(self) -> None:
        super().__init__()
        self.storm = Storm(0)
        self.world = self.storm.world
        for key in list(self.world.models):
            self.world.unwant(key)
        for name in list(self.world.machines):
            self.world.planner.view.remove_node(name)
            del self.world.machines[name]
        self.late: list[Action] = []

    @initialize(gpus=st.lists(st.integers(1, 3), min_size=1, max_size=3), host=st.sampled_from([0, 40, 100]))
    def begin(self, gpus: list[int], host: int) -> None:
        for number, count in enumerate(gpus):
            totals = {f"gpu{device}": 80 for device in range(count)} | {HOST: host}
            self.world.machines[f"n{number}"] = Machine(f"n{number}", totals, keeps_memory=number == 1)

    # -- what happens

    @rule(model=models())
    def want(self, model: Model) -> None:
        self.world.want(model)

    @precondition(lambda self: self.world.models)
    @rule(pick=PICK, wanted=st.integers(0, 3))
    def scale(self, pick: int, wanted: int) -> None:
        model = list(self.world.models.values())[pick % len(self.world.models)]
        self.world.want(structs.replace(model, wanted=min(wanted, model.replicas_max)))

    @precondition(lambda self: self.world.models)
    @rule(pick=PICK)
    def unwant(self, pick: int) -> None:
        self.world.unwant(list(self.world.models)[pick % len(self.world.models)])

    @rule(key=KEYS, waiting=st.integers(0, 2))
    def ask(self, key: str, waiting: int) -> None:
        self.world.ask_for(key, waiting)

    @rule(pick=PICK, running=st.integers(0, 2))
    def work(self, pick: int, running: int) -> None:
        """Requests begin where somebody serves, and end anywhere."""
        bodies = [body for _, body in self.world.bodies()]
        if bodies:
            body = bodies[pick % len(bodies)]
            body.running = running if body.serves else min(running, body.running)
            body.idle_s = 0.0 if body.running else self.world.now_s
            self.world.machines[body.action.node].changed = True

    @rule(pick=PICK)
    def crash(self, pick: int) -> None:
        names = [(machine, name) for machine in self.world.machines.values() for name in machine.bodies]
        if names:
            machine, name = names[pick % len(names)]
            machine.crash(name)

    @rule(name=NODES, dead=st.booleans(), noticed=st.booleans())
    def lose(self, name: str, dead: bool, noticed: bool) -> None:
        if name in self.world.machines:
            machine = self.world.machines[name]
            machine.near = False
            if dead:
                machine.up = False
                machine.reboot()
            if noticed:
                self.world.planner.view.mark_lost(name)

    @rule(name=NODES, drain=st.sampled_from([True, True, False, None]))
    def cordon(self, name: str, drain: bool | None) -> None:
        """An operator cordons or drains a node, or lets it be used again (None)."""
        self.world.cordon(name, None if drain is None else Cordon(drain=drain))

    @rule()
    def back(self) -> None:
        self.storm.befall_back()

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule(seconds=st.sampled_from([0.5, 3.0, 25.0, 70.0]), look=st.booleans())
    def wait(self, seconds: float, look: bool) -> None:
        self.world.now_s += seconds
        self.world.tick()
        if look:
            self.world.look_at_all()

    @rule(asked=st.integers(0, 99), sent=st.integers(0, 99), fails=st.booleans(), reply_lost=st.booleans())
    def plan(self, asked: int, sent: int, fails: bool, reply_lost: bool) -> None:
        """A pass, of which the controller writes down so many actions before it dies, and so many arrive."""
        for action in self.world.plan(compared=True)[: asked + 1]:
            self.world.ask(action)
            self.late.append(action)
        for action in self.late[: sent + 1]:
            self.world.send(action, fails=fails, reply_lost=reply_lost)
            self.world.send(action, reply_lost=True)
        del self.late[: sent + 1]

    @invariant()
    def the_same_is_planned_again(self) -> None:
        """A plan that nobody acts on is the same plan a moment later."""
        first = self.world.plan()
        assert [one.id for one in first] == [one.id for one in self.world.plan(compared=True)]

    def teardown(self) -> None:
        """Then nothing happens any more."""
        if self.world.machines:
            self.storm.calm_down()
            assert self.world.plan() == ()


TestFleet = FleetModel.TestCase
TestFleet.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
