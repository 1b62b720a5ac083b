"""A timeline drawn: a PNG with Pillow, or the same as SVG, alone or in an HTML page."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from launcher.plan.schedule import Span, Timeline

WIDTH, LEFT, RIGHT, TOP, ROW, GAP, BOTTOM = 1400, 90, 90, 46, 34, 6, 44  # pixels
MOST_ROWS = 64
# Forward, backward, weights' gradient; the second chunk of a rank darker.
COLOURS = {"F": ("#7aa6d8", "#3b6ea8"), "B": ("#f0b46c", "#c97a1e"), "W": ("#a8cfa0", "#5f9a56")}
NAMES = {"F": "forward", "B": "backward", "W": "gradient of weights"}
INK, FAINT, IDLE = "#222222", "#777777", "#eeeeee"


def save(timeline: Timeline, path: Path) -> None:
    """By the ending of the name; ValueError when it cannot be written."""
    try:
        if path.suffix == ".png":
            image(timeline).save(path, format="PNG", optimize=True)
        else:
            text = svg(timeline)
            path.write_text(page(timeline, text) if path.suffix == ".html" else text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"picture={path} cannot be written: {error}") from None


def title(timeline: Timeline) -> str:
    micro = 1 + max(span.task.micro_batch for span in timeline.spans)
    return (
        f"{timeline.kind}: {timeline.ranks} stages, {micro} micro-batches, {timeline.seconds:.3g} s, "
        f"idle {timeline.mean_idle:.1%}"
    )


def box(timeline: Timeline, span: Span) -> tuple[float, float, float, float]:
    """left, top, right, bottom in pixels."""
    scale = (WIDTH - LEFT - RIGHT) / timeline.seconds
    first = min(s.start for s in timeline.spans)
    top = TOP + span.rank * (ROW + GAP)
    return LEFT + (span.start - first) * scale, top, LEFT + (span.stop - first) * scale, top + ROW


def shown(timeline: Timeline) -> int:
    return min(timeline.ranks, MOST_ROWS)


def height(timeline: Timeline) -> int:
    return TOP + shown(timeline) * (ROW + GAP) + BOTTOM


def colour(timeline: Timeline, span: Span) -> str:
    return COLOURS[span.task.what][min(span.task.stage // timeline.ranks, 1)]


def image(timeline: Timeline) -> Image.Image:
    picture = Image.new("RGB", (WIDTH, height(timeline)), "white")
    draw = ImageDraw.Draw(picture)
    small, font = ImageFont.load_default(11), ImageFont.load_default(14)
    draw.text((LEFT, TOP / 2), title(timeline), fill=INK, font=ImageFont.load_default(16), anchor="lm")
    for rank in range(shown(timeline)):
        top = TOP + rank * (ROW + GAP)
        draw.rectangle((LEFT, top, WIDTH - RIGHT, top + ROW), fill=IDLE)
        draw.text((LEFT - 8, top + ROW / 2), f"stage {rank}", fill=INK, font=font, anchor="rm")
        idle = f"{timeline.idle[rank]:.1%}"
        draw.text((WIDTH - RIGHT + 8, top + ROW / 2), idle, fill=FAINT, font=font, anchor="lm")
    for span in timeline.spans:
        if span.rank >= MOST_ROWS:
            continue
        left, top, right, bottom = box(timeline, span)
        draw.rectangle((left, top, right, bottom), fill=colour(timeline, span), outline="white")
        if right - left > 16:
            number = str(span.task.micro_batch + 1)
            draw.text(((left + right) / 2, (top + bottom) / 2), number, fill="white", font=small, anchor="mm")
    x = LEFT
    y = height(timeline) - BOTTOM / 2
    for what in sorted({span.task.what for span in timeline.spans}, key="FBW".index):
        draw.rectangle((x, y - 7, x + 14, y + 7), fill=COLOURS[what][0])
        draw.text((x + 20, y), NAMES[what], fill=INK, font=font, anchor="lm")
        x += 40 + int(draw.textlength(NAMES[what], font=font))
    draw.text((WIDTH - RIGHT + 8, TOP - 10), "idle", fill=FAINT, font=font, anchor="lm")
    return picture


def svg(timeline: Timeline) -> str:
    """The same, with a title on each task."""
    tall = height(timeline)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}"',
        f'font-family="sans-serif" font-size="14"><rect width="{WIDTH}" height="{tall}" fill="white"/>',
        f'<text x="{LEFT}" y="{TOP / 2 + 5:.0f}" font-size="16" fill="{INK}">{title(timeline)}</text>',
    ]
    for rank in range(shown(timeline)):
        top, wide = TOP + rank * (ROW + GAP), WIDTH - LEFT - RIGHT
        middle = top + ROW / 2 + 5
        lines.append(f'<rect x="{LEFT}" y="{top}" width="{wide}" height="{ROW}" fill="{IDLE}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end" fill="{INK}">stage {rank}</text>')
        idle = f"{timeline.idle[rank]:.1%}"
        lines.append(f'<text x="{WIDTH - RIGHT + 8}" y="{middle}" fill="{FAINT}">{idle}</text>')
    for span in timeline.spans:
        if span.rank >= MOST_ROWS:
            continue
        left, top, right, _ = box(timeline, span)
        name = f"{NAMES[span.task.what]} of micro-batch {span.task.micro_batch + 1}"
        lines.append(
            f'<rect x="{left:.2f}" y="{top}" width="{right - left:.2f}" height="{ROW}" stroke="white" '
            f'fill="{colour(timeline, span)}"><title>{name}: {span.start:.4g} to {span.stop:.4g} s</title>'
            "</rect>"
        )
    x = LEFT
    for what in sorted({span.task.what for span in timeline.spans}, key="FBW".index):
        lines.append(f'<rect x="{x}" y="{tall - 30}" width="14" height="14" fill="{COLOURS[what][0]}"/>')
        lines.append(f'<text x="{x + 20}" y="{tall - 18}" fill="{INK}">{NAMES[what]}</text>')
        x += 40 + 8 * len(NAMES[what])
    return "\n".join([*lines, "</svg>\n"])


def page(timeline: Timeline, drawing: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title(timeline)}</title>\n'
        f'<body style="margin:1em;background:white">{drawing}</body></html>\n'
    )
