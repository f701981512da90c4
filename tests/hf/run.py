#!/usr/bin/env python
"""
Runs Transformers' common model tests on Raptor and on Dinov2 and compares the two.

    python tests/hf/run.py [--cache DIR] [any pytest argument]

The tests come inside Transformers' source distribution, fetched once from PyPI at the installed version. Prints
why Raptor skips or fails a test. Exits with 1 if Raptor fails one, or does not pass one that Dinov2 passes.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import transformers

HERE = Path(__file__).resolve().parent
# Modules that the common tests import and that the source distribution leaves out: text generation, which Raptor does
# not do, exporters, which tests/test_export.py covers, and a list of arguments that every configuration takes.
STAND_INS = {
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}


def fetch_tests(cache: Path) -> Path:
    """The folder, inside `cache`, that holds the package `tests` of the installed version of Transformers."""
    folder = cache / f"transformers-{transformers.__version__}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as download:
            requirement = f"transformers=={transformers.__version__}"
            options = ["--quiet", "--no-deps", "--no-binary", "transformers", "--dest", download]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
            with tarfile.open(next(Path(download).glob("transformers-*.tar.gz"))) as archive:
                members = [m for m in archive if m.name.startswith(f"{folder.name}/tests/")]
                archive.extractall(download, members, filter="data")
            tests = Path(download) / folder.name / "tests"
            (tests / "__init__.py").touch()
            for path, text in STAND_INS.items():
                (tests / path).parent.mkdir(exist_ok=True)
                (tests / path).write_text(text)
            tests.parent.rename(folder)
    return folder


# Passed by Dinov2 and skipped by Raptor, rightly.
NOT_FOR_RAPTOR = {
    "test_can_load_from_already_mapped_keys": "Transformers renames weights of Dinov2 while loading, none of Raptor",
}
RANK = ("passed", "skipped", "failed")


class Outcomes:
    """A pytest plugin: per test class, each test's outcome (the worst of its subtests) and the reason for it."""

    def __init__(self):
        self.by_class = defaultdict(dict)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        outcome, reason = report.outcome, ""
        if outcome == "skipped":
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif outcome == "failed":
            reason = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()[:160]
        class_name, test = report.nodeid.split("::")[-2:]
        known = self.by_class[class_name].get(test, ("passed", ""))
        self.by_class[class_name][test] = max(known, (outcome, reason), key=lambda pair: RANK.index(pair[0]))


def main() -> int:
    default_cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "raptor_hf"
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--cache", type=Path, default=default_cache, help="folder for the fetched tests")
    args, pytest_args = parser.parse_known_args()

    folder = fetch_tests(args.cache.resolve())
    sys.path.insert(0, str(folder))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    outcomes = Outcomes()
    isolation = ["-c", os.devnull, f"--rootdir={HERE}", "--noconftest", "--import-mode=importlib"]
    isolation += ["-p", "no:cacheprovider", "-W", "ignore", "-q", "-rN", "--no-header", "--tb=short"]
    status = pytest.main([*isolation, str(HERE / "common.py"), *pytest_args], plugins=[outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return status

    wrong = 0
    for yardstick, dinov2 in list(outcomes.by_class.items()):
        if not yardstick.startswith("Dinov2"):
            continue
        raptor = outcomes.by_class[yardstick.replace("Dinov2", "Raptor")]
        print(f"\n{yardstick.removeprefix('Dinov2')}")
        for name, results in (("Raptor", raptor), ("Dinov2", dinov2)):
            counts = Counter(outcome for outcome, _ in results.values())
            print(f"  {name}: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in RANK))
        for name, results, outcome in (
            ("Raptor", raptor, "skipped"),
            ("Raptor", raptor, "failed"),
            ("Dinov2", dinov2, "failed"),
        ):
            tests_of_reason = defaultdict(list)
            for test, (result, reason) in results.items():
                if result == outcome:
                    tests_of_reason[reason].append(test)
            for reason, tests in sorted(tests_of_reason.items()):
                print(f"  {name} {outcome}: {', '.join(tests)}\n    {reason}")
        behind = [
            test
            for test, (outcome, _) in dinov2.items()
            if outcome == "passed" and raptor[test][0] != "passed" and test not in NOT_FOR_RAPTOR
        ]
        if behind:
            print(f"  Passed by Dinov2 but not by Raptor: {', '.join(behind)}")
        wrong += len(behind) + sum(outcome == "failed" for outcome, _ in raptor.values())
    if wrong or not outcomes.by_class:
        return 1
    print("\nRaptor fails no test, and passes every one that Dinov2 passes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
