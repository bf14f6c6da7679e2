"""docs/requirements.md and docs/known-faults.md agree with the tests, both ways."""

from docs import tables


def test_every_id_has_a_test_and_every_listed_test_exists() -> None:
    """The tables equal what the tests themselves name; `python -m docs.tables` makes them so."""
    assert tables.problems() == []


def test_all_requirements_are_listed() -> None:
    listed = tables.rows(tables.FILES[0].read_text()).keys()
    wanted = tables.ids_in("S1-01..S1-37 M-01..M-33 S2-01..S2-32 H1..H16 H3a H3b") - {"H3"}
    assert listed == wanted
    assert len(listed) == 37 + 33 + 32 + 17


def test_all_known_faults_are_listed() -> None:
    """72 reports, numbered with gaps; none waits for a later version."""
    listed = tables.rows(tables.FILES[1].read_text())
    assert len(listed) == 72
    later = {id_ for id_, (text, tests) in listed.items() if not tests and "Later:" in text}
    assert later == set()


def test_every_listed_test_names_its_id() -> None:
    """The other direction, without the renderer: what a row lists really mentions the row's id."""
    found = tables.collect()
    for path in tables.FILES:
        for id_, (_, tests) in tables.rows(path.read_text()).items():
            assert set(tests) <= set(found.get(id_, [])), id_


def test_ids_are_read_from_text_and_names() -> None:
    assert tables.ids_in("S1-07, M-12 and H3a; B023.") == {"S1-07", "M-12", "H3a", "B023"}
    assert tables.ids_in("S1-26..S1-28, S2-08..10, H14..H16") == {
        *("S1-26", "S1-27", "S1-28", "S2-08", "S2-09", "S2-10", "H14", "H15", "H16")
    }
    assert tables.ids_in("H3: both kinds") == {"H3a", "H3b"}
    assert tables.ids_in("H100, H17, S1-7, M-123, SHA1-12") == set()
    assert tables.ids_in_name("test_s1_07_and_h3a_and_b023_hold") == {"S1-07", "H3a", "B023"}
    assert tables.ids_in_name("test_m_12") == {"M-12"}
    assert tables.ids_in_name("test_the_chain_of_64_bits") == set()
