"""The faults that tests/mutations.py plants still fit the code: one that plants nothing shows nothing."""

from collections import Counter
from pathlib import Path

from tests.planted_elsewhere import ELSEWHERE
from tests.planted_faults import CONTROL_PLANE

ROOT = Path(__file__).resolve().parents[2]
FAULTS = [*CONTROL_PLANE, *ELSEWHERE]


def test_every_fault_fits_in_one_place_and_changes_it() -> None:
    texts = {fault.file: (ROOT / fault.file).read_text() for fault in FAULTS}
    assert [fault.name for fault in FAULTS if texts[fault.file].count(fault.old) != 1] == []
    assert [fault.name for fault in FAULTS if fault.old == fault.new] == []
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_every_fault_names_tests_that_are_there() -> None:
    assert len(CONTROL_PLANE) > 40
    for fault in ELSEWHERE:
        assert fault.tests, fault.name
        assert all((ROOT / path).exists() for path in fault.tests), fault.name
