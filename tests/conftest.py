from collections import Counter

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="rewrite the golden traces in tests/golden")
    parser.addoption("--download", action="store_true", help="let the zoo take its data from Debian")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what did not run by reason. A reason says which target of the Makefile runs it."""
    stats = terminalreporter.stats
    # By name, because a file is collected twice: for its tests and for its doctests.
    reasons = {report.nodeid: str(report.longrepr[2]) for report in stats.get("skipped", [])}
    for item in stats.get("deselected", []):
        if item.get_closest_marker("large"):
            reasons[item.nodeid] = "they take minutes; make test-large runs them"
    counts = Counter(
        ("tests" if "::" in name else "files", reason.removeprefix("Skipped: "))
        for name, reason in reasons.items()
    )
    for (kind, reason), count in counts.most_common():
        terminalreporter.write_line(f"{count} {kind} not run: {reason}")
