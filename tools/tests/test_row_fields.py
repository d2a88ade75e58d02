from pcomm.integration.metrics.rows import FIELDS
from repository import ROOT


def test_every_number_of_a_row_is_explained_on_the_page_of_training():
    page = (ROOT / "docs/how-to/train-on-your-text.md").read_text()
    table = page.partition("<!-- row fields -->\n")[2].partition("<!-- end -->")[0]
    lines = table.splitlines()[2:]
    expected = [f"| `{n}` | `{f.tag}` | {f.meaning} |" for n, f in FIELDS.items() if n != "step"]
    assert lines == expected
