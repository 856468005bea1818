"""Draws docs/nvrar.svg: an all-reduce over 4 nodes of 2 ranks. Run: python docs/nvrar_drawing.py"""

from __future__ import annotations

from pathlib import Path

NODES, RANKS = 4, 2
COLUMNS = ["input", "reduce-scatter", "exchange 1", "exchange 2", "all-gather"]
PHASES = ["", "intra-node", "inter-node", "inter-node", "intra-node"]
SIZE, PAIR, NODE = 26, 34, 92  # pixels: side of a square, distance between ranks, between nodes
LEFT, TOP, ACROSS = 130, 74, 150

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #7d8590; text-anchor: middle }
  .left { text-anchor: end } .small { font-size: 11px } .sum { font-weight: 600 }
  .node { fill: #8c959f; fill-opacity: .10; stroke: #8c959f; stroke-opacity: .5 }
  .a { fill: #2f81f7; stroke: #2f81f7 } .b { fill: #db8b0b; stroke: #db8b0b }
  line { stroke-width: 1.6; fill: none } .absent { fill-opacity: 0; stroke-opacity: .35; stroke-dasharray: 2 3 }
  @media (prefers-color-scheme: light) { text { fill: #424a53 } }
  @media (prefers-color-scheme: dark) { text { fill: #c9d1d9 } }
"""


def position(column: int, node: int, rank: int) -> tuple[int, int]:
    """Return the left edge and the vertical middle of the two squares of a rank."""
    return LEFT + column * ACROSS, TOP + node * NODE + rank * PAIR + SIZE // 2


def squares(column: int, node: int, rank: int) -> list[str]:
    """Draw the two shards of a rank, with the number of inputs in each sum. Dashed: another rank owns the shard."""
    x, y = position(column, node, rank)
    drawn = []
    for shard, name in enumerate("ab"):
        inputs = [1, 2, 4, 8, 8][column]
        absent = 0 < column < 4 and shard != rank
        left = x + shard * SIZE
        opacity = "" if absent else f' fill-opacity="{[0.12, 0.2, 0.35, 0.55, 0.55][column]}"'
        kind = f"{name} absent" if absent else name
        box = f'x="{left}" y="{y - SIZE // 2}" width="{SIZE}" height="{SIZE}"'
        drawn.append(f'<rect class="{kind}"{opacity} {box}/>')
        if not absent:
            drawn.append(f'<text class="sum" x="{left + SIZE // 2}" y="{y + 5}">{inputs}</text>')
    return drawn


def arrow(column: int, source: tuple[int, int], target: tuple[int, int], shard: int) -> str:
    """Draw an arrow from the squares of a rank to those of another rank in the next column."""
    (x0, y0), (x1, y1) = position(column, *source), position(column + 1, *target)
    name = "ab"[shard]
    return (
        f'<line class="{name}" marker-end="url(#{name})" x1="{x0 + 2 * SIZE + 4}" y1="{y0}" x2="{x1 - 9}" y2="{y1}"/>'
    )


def drawing() -> str:
    width, height = LEFT + 4 * ACROSS + 2 * SIZE + 24, TOP + NODES * NODE - 8
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
             "<title>NVRAR on 4 nodes of 2 ranks</title>", f"<style>{STYLE}</style>", "<defs>"]  # fmt: skip
    for name in "ab":
        parts.append(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="{name}" d="M0 0 8 4 0 8z"/></marker>'
        )
    parts.append("</defs>")
    for column, (title, phase) in enumerate(zip(COLUMNS, PHASES, strict=True)):
        x = LEFT + column * ACROSS + SIZE
        parts.append(f'<text x="{x}" y="24">{title}</text><text class="small" x="{x}" y="42">{phase}</text>')
    for node in range(NODES):
        y = TOP + node * NODE - 12
        parts.append(
            f'<rect class="node" rx="8" x="{LEFT - 22}" y="{y}" width="{width - LEFT + 14}" height="{NODE - 8}"/>'
        )
        for rank in range(RANKS):
            parts.append(f'<text class="left small" x="{LEFT - 32}" y="{position(0, node, rank)[1] + 4}">'
                         f"node {node}, rank {node * RANKS + rank}</text>")  # fmt: skip
            for column in range(len(COLUMNS)):
                parts += squares(column, node, rank)
            other = 1 - rank
            parts.append(arrow(0, (node, rank), (node, other), other))
            parts.append(arrow(1, (node, rank), (node ^ 1, rank), rank))
            parts.append(arrow(2, (node, rank), (node ^ 2, rank), rank))
            parts.append(arrow(3, (node, rank), (node, other), rank))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("nvrar.svg").write_text(drawing(), encoding="utf-8")
