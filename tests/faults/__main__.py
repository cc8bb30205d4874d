"""``python -m tests.faults --kills 100``: fire at runs of all settings; says what was lost."""

import argparse
import contextlib
import io

from rich.progress import track

from tests.faults.kills import SETTINGS, Range


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--shots", type=int, default=4, help="at one run (default: 4)")
    arguments = parser.parse_args()
    hits = faults = 0
    with contextlib.redirect_stdout(io.StringIO()):
        ranges = [Range(setting) for setting in SETTINGS]
    for seed in track(range(arguments.kills // arguments.shots), "firing"):
        target = ranges[seed % len(ranges)]
        with contextlib.redirect_stdout(io.StringIO()):
            report = target.fire(seed, arguments.shots)
        hits += report.hits
        if report.faults:
            faults += 1
            print(f"seed {seed}, {target.setting}:", *report.faults, sep="\n  ", flush=True)
    print(f"{hits} of {arguments.kills} signals ended an attempt; {faults} runs did not end as if left alone")
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
