"""``python -m tests.fuzz --first 0 --count 200 --ranks 2``: try seeds, and say which fail. With ``--resharding``, of
checkpoints that go from some ranks to others."""

import argparse
import contextlib
import io
import random
import tempfile

from tests.fuzz.resharding import Move, changes
from tests.fuzz.training import differences
from tests.harness import WorldError, run


def trains(seed: int, ranks: int) -> list[str]:
    try:
        return [text for by_seed in run(ranks, differences, [seed]) for text in by_seed.values()]
    except WorldError as error:
        return [str(error)]


def reshards(seed: int, ranks: int) -> list[str]:
    """Between any numbers of ranks up to ``ranks``."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        return list(changes(folder, [Move(seed, (draw.randint(1, ranks), draw.randint(1, ranks)))]).values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--resharding", action="store_true")
    arguments = parser.parse_args()
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        with contextlib.redirect_stdout(io.StringIO()):
            found = (reshards if arguments.resharding else trains)(seed, arguments.ranks)
        if found:
            failed += 1
            print(f"\nseed {seed}:", *dict.fromkeys(found), sep="\n  ", flush=True)
    print(f"\n{arguments.count} seeds at {arguments.ranks} ranks, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
