"""Layers × nodes as plain text: who holds what, how many copies there are, and where there is a gap. Pure."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.gateway.page_state import ModelView, NodeView, PageState

MARKS = {"serving": "#", "spare": "+", "draining": "-", "loading": "~", "loadable": "o"}
NOBODY, GAP, ASLEEP = ".", "!", "o"
LEGEND = "# serves  + stands by  o asleep, loads when asked  ~ loads  - hands over  . nothing  ! nobody"
_COUNTED = "#+"
_STRENGTH = ".o~-+#"  # of a mark; the strongest on a node stands for a layer, the weakest layer for a column
_SCARCITY = "!o123456789"
_WIDEST = 96


def layer_strip(state: "PageState", model: "ModelView") -> list[str]:
    """A ruler, a row for each node that is there, and the copies of each layer; columns are layers, or several where there are many."""
    nodes = [node for node in state.nodes if node.state != "lost"]
    marks = [_marks(node, model) for node in nodes]
    per_column = -(-model.layer_count // _WIDEST)
    labels = ["layer", *(f"{node.name or node.id[:8]}"[:16] for node in nodes), "copies"]
    rows = [
        _ruler(model.layer_count, per_column),
        *(_columns(each, per_column) for each in marks),
        _copies(marks, model.layer_count, per_column),
    ]
    width = max(len(label) for label in labels)
    return [f"{label.ljust(width)}  {row}".rstrip() for label, row in zip(labels, rows, strict=True)]


def _marks(node: "NodeView", model: "ModelView") -> str:
    held = [NOBODY] * model.layer_count
    for shard in node.shards:
        if shard.model == model.id:
            mark = MARKS[shard.state]
            for layer in range(shard.first, min(shard.last + 1, model.layer_count)):
                held[layer] = max(held[layer], mark, key=_STRENGTH.index)
    return "".join(held)


def _columns(marks: str, per_column: int) -> str:
    columns = [marks[start : start + per_column] for start in range(0, len(marks), per_column)]
    return "".join(min(column, key=_STRENGTH.index) for column in columns)


def _copies(marks: list[str], layer_count: int, per_column: int) -> str:
    copies = [_copies_of([each[layer] for each in marks]) for layer in range(layer_count)]
    return "".join(
        min(copies[start : start + per_column], key=_SCARCITY.index) for start in range(0, layer_count, per_column)
    )


def _copies_of(marks: list[str]) -> str:
    """How many can compute a layer now; where nobody can, whether somebody will when asked."""
    count = sum(mark in _COUNTED for mark in marks)
    return str(min(count, 9)) if count else ASLEEP if ASLEEP in marks else GAP


def _ruler(layer_count: int, per_column: int) -> str:
    ruler = ""
    for column in range(0, -(-layer_count // per_column), 10):
        ruler = ruler.ljust(column) + str(column * per_column)
    return ruler
