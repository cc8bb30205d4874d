"""``python -m tests.fuzz --first 0 --count 200 --ranks 2``: try seeds, and say which fail."""

import argparse
import contextlib
import io

from tests.fuzz.training import differences
from tests.harness import WorldError, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                results = run(arguments.ranks, differences, [seed])
            found = [text for by_seed in results for text in by_seed.values()]
        except WorldError as error:
            found = [str(error)]
        if found:
            failed += 1
            print(f"\nseed {seed}:", *dict.fromkeys(found), sep="\n  ", flush=True)
    print(f"\n{arguments.count} seeds at {arguments.ranks} ranks, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
