from largest import FILE_LIMIT, functions, num_lines, report
from repository import ROOT, sources


def test_no_source_file_is_over_the_limit():
    over = [str(p.relative_to(ROOT)) for p in sources() if num_lines(p) > FILE_LIMIT]
    assert over == [], f"over {FILE_LIMIT} lines: one idea a file, so these are two"


def test_functions_are_measured_with_their_last_line(tmp_path):
    path = ROOT / "tools" / "largest.py"
    lengths = {place.split()[1]: length for length, place in functions(path)}
    assert lengths["num_lines"] == 3


def test_report_names_the_longest_source_file():
    longest = max(sources(), key=num_lines)
    assert f"{num_lines(longest):6}  {longest.relative_to(ROOT)}" in report()
