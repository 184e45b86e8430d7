"""What is wanted next of each replica, on the way to one revision. Pure.

Theory. Given what is there (`stock.py`), this is how it moves. Of a set on trial one replica is started, and nobody
leaves for it where there is room. Leaving is draining: streams are handed over, and what is left at the bound, when the
replica is stopped, its frontends resume.

Where there is no room for one more, a new engine stands by beside an old one on its device, if that has the memory.
When it is ready it takes over, the old one drains meanwhile, and is kept until the new one counts: nobody waits, for
both have what they need. Else one old one at a time gives up its place first, and requests that find nobody are held.

Always true: nobody is told to leave who may not; there are never more than replicas and surge, each in its own place;
who is wanted by the revision and drains is called back before another is started; a whole service that is wanted no
more leaves last; and to move twice, as things are, is to move once.
"""

from __future__ import annotations

from msgspec import structs

from holdfast.rollout.replica import COMING, Replica, Stage, Want
from holdfast.rollout.stock import Stock


def move(stock: Stock) -> None:
    """Change what is wanted, as far as it may be now."""
    _think_again(stock)
    _hand_over(stock)
    for service in stock.target.parts:
        _call_back(stock, service)
    for service in _free(stock):
        _start(stock, service)
    _retire_all(stock)
    _let_go(stock)


def _free(stock: Stock) -> list[str]:
    return [service for service in stock.target.parts if service not in stock.held]


def _think_again(stock: Stock) -> None:
    """Who was to drain, serves and was not told (whoever decided it died) is thought of anew, as things are now."""
    for name, one in list(stock.replicas.items()):
        untold = one.want is Want.DRAIN and one.asked_s is None and stock.seen(name).stage is Stage.SERVING
        if untold and not stock.heirs(name):
            stock.want(name, Want.SERVE)


def _hand_over(stock: Stock) -> None:
    """Who stands by takes over when it is ready: from then on the one that it stands beside drains."""
    for name, one in list(stock.replicas.items()):
        if one.want is not Want.STAND_BY or stock.is_old(name):
            continue
        host = stock.replicas.get(one.beside)
        if host is None or host.want is not Want.SERVE:
            stock.want(name, Want.SERVE)
        elif stock.seen(name).stage is Stage.STANDBY and one.service not in stock.held and stock.is_enough(one.beside):
            stock.want(name, Want.SERVE)
            _leave(stock, one.beside)


def _call_back(stock: Stock, service: str) -> None:
    """Who drains and is wanted after all; also where it is paused, for it is no step forward."""
    for name in stock.of(service, old=False, wants=(Want.DRAIN,))[: max(0, stock.missing(service))]:
        stock.want(name, Want.SERVE)


def _start(stock: Stock, service: str) -> None:
    few = min(stock.missing(service), stock.vacant(service))
    if stock.is_on_trial(service):
        few = min(few, 1 - len(stock.of(service, old=False, wants=(Want.SERVE,))))
    for _ in range(few):
        stock.add(service)
    if stock.is_cramped(service) and (host := stock.host(service)):
        stock.add(service, beside=host)


def _retire_all(stock: Stock) -> None:
    """First those that are too many, what serves least and then the newest first; then other sets; last whole services
    wanted no more."""
    parts = stock.target.parts
    for service in _free(stock):
        newest = list(reversed(stock.of(service, old=False)))
        newest.sort(key=stock.serving)
        _retire(stock, newest[: max(0, -stock.missing(service))])
        _retire(stock, sorted(stock.of(service, old=True), key=stock.serving))
    gone = [name for name, one in stock.replicas.items() if one.service not in parts]
    if all(map(stock.is_up, parts)):
        _retire(stock, gone)
    elif any(map(stock.is_cramped, parts)) and all(stock.replicas[name].want in COMING for name in gone):
        _retire(stock, gone[:1])


def _retire(stock: Stock, names: list[str]) -> None:
    staying: set[str] = set()  # of sets: where one that counts may not leave, no other may
    for name in names:
        one = stock.replicas[name]
        if one.want not in COMING or stock.heirs(name) or (one.set_id in staying and stock.counts(name)):
            continue
        if stock.may_leave(name):
            _leave(stock, name)
        elif stock.counts(name):
            staying.add(one.set_id)


def _leave(stock: Stock, name: str) -> None:
    """By draining; who only stood by just ends, and the one it stood beside is called back."""
    one, part = stock.replicas[name], stock.part(stock.replicas[name].service)
    waited_for = one.service in stock.target.parts and stock.is_cramped(one.service)
    want = Want.STOP if one.want is Want.STAND_BY else Want.DRAIN
    stock.want(name, want, part.swap_drain_s if waited_for else part.drain_s)
    if not waited_for and not stock.is_undo:
        _leave_as_last(stock, one)
    host = stock.replicas.get(one.beside)
    if host is not None and host.want is Want.DRAIN and not one.counted:
        stock.want(one.beside, Want.SERVE)


def _leave_as_last(stock: Stock, last: Replica) -> None:
    """Of a set of which nobody stays, all that drain have the time that their streams take to end."""
    its = {n: one for n, one in stock.replicas.items() if (one.service, one.set_id) == (last.service, last.set_id)}
    until_s = stock.now_s + stock.part(last.service).last_drain_s
    if all(one.want not in COMING for one in its.values()):
        stock.replicas |= {n: structs.replace(one, until_s=until_s) for n, one in its.items() if one.until_s}


def _let_go(stock: Stock) -> None:
    """Stop who has drained; but one with an heir only when that counts and was tried. Forget who is gone."""
    for name, one in list(stock.replicas.items()):
        if one.want is Want.DRAIN and stock.has_drained(name):
            stock.replicas[name] = structs.replace(one, until_s=None)
            if all(map(stock.is_proven, stock.heirs(name))):
                stock.want(name, Want.STOP)
        if stock.replicas[name].want is Want.STOP and stock.seen(name).stage is Stage.ABSENT:
            del stock.replicas[name]
