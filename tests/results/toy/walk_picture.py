"""Draw what tests/tools/walk.py prints in a terminal: the picture of README.md. Flags go to walk.py.

    pip install matplotlib
    python tests/results/toy/walk_picture.py walk.png --script grpo
"""
import contextlib
import io
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import walk  # noqa: E402

SHOWN = 2, 3  # what is printed before the first title is 0: these are the pushes and the log-probs

class Terminal(io.StringIO):
    """Keeps what is printed; walk.py takes it for a terminal and prints colours."""
    def isatty(self):
        return True

def rgb(number):
    """The colour of a number from 16 to 255 in the palette of 256 that terminals share."""
    if number >= 232:
        return ((8 + 10 * (number - 232)) / 255,) * 3
    number -= 16
    levels = number // 36, number // 6 % 6, number % 6
    return tuple((55 + 40 * level if level else 0) / 255 for level in levels)

def draw(text, out):
    """Draw lines of text with escape codes, a cell for each character."""
    import matplotlib
    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot as plt
    lines = text.splitlines()
    figure = plt.figure(figsize=(8.2, 0.2 * len(lines) + 0.2), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1), xlim=(-1, 81), ylim=(len(lines) + 0.5, -0.5))
    axis.set_axis_off()
    for y, line in enumerate(lines):
        x = 0
        for token, shade, painted in re.findall(r"(\033\[48;5;(\d+);38;5;16m(.*?)\033\[0m|.)", line):
            for character in painted or token:
                if shade:
                    axis.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=rgb(int(shade)), edgecolor="none"))
                axis.text(x + 0.5, y + 0.5, character, family="monospace", fontsize=11,
                          ha="center", va="center")
                x += 1
    figure.savefig(out, dpi=100)

def main(out, *flags):
    printed, sys.stdin = Terminal(), io.StringIO()  # this is not a terminal: nobody presses Enter
    with contextlib.redirect_stdout(printed):
        walk.main(flags)
    screens = re.split(r"\n(?=---- )", printed.getvalue())
    draw("\n".join(screens[i] for i in SHOWN), out)

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("which file is the picture to be written to?")
    main(*sys.argv[1:])
