import re

import pytest

from benchmark_page import note, picture, sections, text
from reference_pages import DOCS, pages
from repository import ROOT

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_what_the_repository_holds(name):
    assert (DOCS / name).read_text() == PAGES[name], "run `python tools/reference_pages.py`"


def test_configuration_page_has_a_table_for_each_section():
    page = PAGES["reference/configuration.md"]
    assert page.count("| key | takes | default | meaning |") == page.count("\n## ")
    assert "| `sequence` | true or false | `false` |" in page


def test_environment_page_has_each_variable_that_the_sources_name():
    name = r"""["'](\w+)["']"""
    read = re.compile(rf"\b(?:environ|getenv)(?:\.\w+)?[\[(]{name}|{name} (?:not )?in os\.environ")
    sources = [path for path in ROOT.glob("**/src/**/*.py") if "testing" not in path.parts]
    found = {one for path in sources for pair in read.findall(path.read_text()) for one in pair}
    assert {"RANK", "TRITON_INTERPRET"} < found
    page = PAGES["reference/environment.md"]
    assert [one for one in sorted(found - {""}) if f"| `{one}` |" not in page] == []


CSV = """\
benchmark,case,value,unit,ratio_to,ratio,hardware,command
calls,dict,0.1,us,,,a CPU,python calls.py
calls,look|up,0.2,us,dict,2.0,a CPU,python calls.py
step,plain,5.0,ms,,,a CPU,python step.py
"""


def test_benchmark_page_has_a_section_for_each_benchmark(tmp_path):
    path = tmp_path / "core.csv"
    path.write_text(CSV)
    head = "| case | value | unit | ratio | ratio_to |\n|---|---|---|---|---|\n"
    assert sections(path) == (
        "\n### calls\n\n- hardware: a CPU\n- command: python calls.py\n\n"
        f"{head}| dict | 0.1 | us |  |  |\n| look\\|up | 0.2 | us | 2.0 | dict |\n"
        "\n### step\n\n- hardware: a CPU\n- command: python step.py\n\n"
        f"{head}| plain | 5.0 | ms |  |  |\n"
    )


GRID = """\
benchmark,case,value,unit,ratio_to,ratio,rounds
moves,old @ 2 ranks,12.3456,ms,,,9
moves,new @ 2 ranks,6.1,ms,old @ 2 ranks,0.494,9
moves,new @ 4 ranks,3.0,ms,,,3
moves,new @ 4 ranks,2048,collectives,,,1
"""


def test_cases_that_name_a_place_become_a_column_and_a_line(tmp_path):
    path = tmp_path / "moves.csv"
    path.write_text(GRID)
    assert sections(path) == (
        "\n### moves\n\n- rounds: 9 or 3 or 1\n"
        "\n| ms | old | new |\n|---|---|---|\n| 2 ranks | 12.35 | 6.1 (0.49) |\n"
        "| 4 ranks | - | 3 |\n\nIn brackets: new / old.\n"
        "\n| collectives | new |\n|---|---|\n| 4 ranks | 2048 |\n"
    )


def test_a_picture_is_shown_where_there_is_one(tmp_path):
    assert picture(tmp_path / "moves.csv") == ""
    (tmp_path / "moves.png").touch()
    assert picture(tmp_path / "moves.csv") == "\n![What was measured in moves](moves.png)\n"


def test_predictions_are_called_so(tmp_path):
    (tmp_path / "moves_simulated.png").touch()
    shown = picture(tmp_path / "moves_simulated.csv")
    assert shown == "\n![What was predicted in moves_simulated](moves_simulated.png)\n"


def test_a_note_stands_before_the_rows_it_speaks_of(tmp_path):
    path = tmp_path / "moves.csv"
    path.write_text(GRID)
    assert note(path) == ""
    (tmp_path / "moves.note").write_text("What to know.\n")
    assert "\n## moves\n\nWhat to know.\n\n### moves\n" in text([path])
