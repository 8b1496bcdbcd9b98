"""A start by phases as SVG, from the figures of bench/start.py. Text is text, and colours follow a dark page."""

from __future__ import annotations

from html import escape

STYLE = """\
  text { font: 14px system-ui, sans-serif; fill: #1f2933 }
  .title { font-size: 18px; font-weight: 600 } .dim { fill: #616e7c }
  .p0 { fill: #829ab1 } .p1 { fill: #3e7cb1 } .p2 { fill: #2a9d8f } .p3 { fill: #e9a23b } .p4 { fill: #c8553d } .p5 { fill: #9f7aea }
  @media (prefers-color-scheme: dark) { text { fill: #e4e7eb } .dim { fill: #9aa5b1 } }"""
PHASES = {  # our names -> what happens, and which of belljar's phases that is
    "itself": ("belljar itself", "Python starts, options and settings are read; at the end it leaves", ("itself",)),
    "prepare": ("prepare", "a folder, a journal, a disk of its own", ("prepare",)),
    "boot": ("start and boot", "QEMU starts; the guest answers", ("start", "boot")),
    "identify": ("identify", "new entropy, clock, hostname, machine-id, proved", ("identify", "ready", "setup")),
    "run": ("run", "the job: true", ("run", "fetch")),
    "stop": ("stop and clean", "QEMU ends, the disk goes, one line in the ledger", ("stop", "clean")),
}
WIDTH, LEFT, ROW = 900, 24, 26


def picture(phases: dict[str, dict[str, float]], runs: int) -> str:
    """*phases*: for a clone and a cold boot, seconds of each phase."""
    clone, cold = (
        {name: sum(way[part] for part in parts) for name, (_, _, parts) in PHASES.items()}
        for way in (phases["clone"], phases["cold"])
    )
    whole, longest = sum(clone.values()), sum(cold.values())
    below = 96 + ROW * len(PHASES)
    lines = [
        text(LEFT, 32, f"belljar run -- true: {ms(whole)} from nothing to the end", "title"),
        *bar(clone, 48, 30, whole),
        *(line for number, name in enumerate(PHASES) for line in legend(number, name, clone[name], 104 + ROW * number)),
        text(LEFT, below + 34, "The same image, booted cold, at one scale", "title"),
        *bar(clone, below + 48, 18, longest),
        text(LEFT + (WIDTH - 2 * LEFT) * whole / longest + 10, below + 62, f"clone {ms(whole)}"),
        *bar(cold, below + 74, 18, longest),
        text(LEFT, below + 112, f"cold boot {ms(longest)}, of which the guest's boot is {ms(cold['boot'])}"),
        text(LEFT, below + 138, f"Medians of {runs} runs of bench/start.py on two cores without hardware virtualization.", "dim"),
    ]  # fmt: skip
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {below + 156}" role="img">'
    return "\n".join(
        (head, "<title>A start in milliseconds, by phase</title>", f"<style>\n{STYLE}\n</style>", *lines, "</svg>\n")
    )


def bar(values: dict[str, float], y: float, height: float, scale: float) -> list[str]:
    lines, x = [], float(LEFT)
    for number, value in enumerate(values.values()):
        width = (WIDTH - 2 * LEFT) * value / scale
        lines.append(f'<rect class="p{number}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>')
        x += width
    return lines


def legend(number: int, name: str, value: float, y: float) -> list[str]:
    title, about, _ = PHASES[name]
    return [
        f'<rect class="p{number}" x="{LEFT}" y="{y - 12}" width="14" height="14"/>',
        f'<text x="{LEFT + 82}" y="{y}" text-anchor="end">{ms(value)}</text>',
        text(LEFT + 100, y, title),
        text(LEFT + 240, y, about, "dim"),
    ]


def text(x: float, y: float, words: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text{mark} x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def ms(value: float) -> str:
    return f"{value * 1000:.0f} ms"
