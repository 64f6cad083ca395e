"""Islands inside one process: each in a thread of its own, one running at a time."""

import threading
from collections.abc import Callable

from dilocox.outer.transport.memory import Hub, MemoryLaneGroup, Turns


def run_in_turns(
    islands: int,
    lane: str,
    body: Callable[[int, MemoryLaneGroup], None],
    on_turn: Callable[[int], None] = lambda island: None,
) -> None:
    """Run `body(island, its lane group)` for each island, in turns; raises the first island's error.

    `on_turn(island)` is called whenever that island goes on. With several processes (a Megatron world of tp·pp·dp
    ranks), each calls this for its lane. A Ctrl-C ends the process without waiting for the islands.
    """
    turns = Turns(islands, on_turn)
    hub = Hub(turns)

    def run(island: int) -> None:
        error: BaseException | None = None
        try:
            turns.start(island)
            body(island, MemoryLaneGroup(hub, island=island, lane=lane))
        except BaseException as caught:
            error = caught
        turns.end(island, error)

    threads = [
        threading.Thread(target=run, args=(island,), name=f"island-{island}", daemon=True) for island in range(islands)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failure is not None:
        raise turns.failure[1]
