"""What everyone who maps the device is told of its pool: by each effect, and upon taking a seat. Pure.

Always true: whoever heard all news, or took its seat later, knows who owned the pool last, whether that owner is still
there, and which pool there is to map.
"""

from __future__ import annotations

from holdfast.memory.protocol import DROPPED, GRANTED, MADE, OWNER_GONE, PoolNews
from holdfast.memory.vault.pool_state import Pool
from holdfast.memory.vault.pool_words import DropPool, Effect, GrantPool, Made, Orphaned


def news_of(effect: Effect) -> PoolNews | None:
    match effect:
        case Orphaned(epoch):
            return PoolNews(OWNER_GONE, epoch)
        case DropPool(epoch):
            return PoolNews(DROPPED, epoch)
        case GrantPool(_, epoch):
            return PoolNews(GRANTED, epoch)
        case Made(epoch):
            return PoolNews(MADE, epoch)
        case _:
            return None


def missed(state: Pool) -> tuple[PoolNews, ...]:
    """All that matters of what one who comes now, or comes back, has not heard, in the order it happened.

    A vault that never granted anything says nothing: after a total loss the owner may still give its pool back.
    """
    if not state.last_epoch:
        return ()
    pages, epoch = state.pages, state.last_epoch
    pool = (PoolNews(MADE, pages.made_epoch),) if pages is not None and pages.made else ()
    if state.owner is not None:
        return PoolNews(GRANTED, epoch), *pool
    return (*pool, PoolNews(OWNER_GONE, epoch)) if pool else (PoolNews(OWNER_GONE, epoch), PoolNews(DROPPED, epoch))
