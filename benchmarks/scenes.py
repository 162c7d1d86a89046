"""Pictures of coloured shapes, with questions about them and true answers, for a demo model that sees.

python -m benchmarks.scenes shapes.png  # draws one, and says what is in it
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

CANVAS = 224  # pixels of what is drawn
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 30),
    "purple": (150, 50, 190),
    "orange": (245, 135, 20),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("no", "one", "two", "three")
GROUNDS = ((255, 255, 255), (235, 235, 235), (20, 20, 20), (60, 60, 70), (225, 235, 250))
Thing = tuple[str, str]
"""A colour and a shape."""


@dataclass(frozen=True)
class Scene:
    """A picture, and the things in it from left to right."""

    picture: Image.Image
    things: tuple[Thing, ...]


def draw(things: tuple[Thing, ...], rng: random.Random, ground: tuple[int, ...] | None = None) -> Scene:
    """A scene of these things. ground: the colour behind them; None: any."""
    ground = ground or rng.choice(GROUNDS)
    picture = Image.new("RGB", (CANVAS, CANVAS), ground)
    pen = ImageDraw.Draw(picture)
    width = CANVAS / len(things)
    for place, (colour, shape) in enumerate(things):
        radius = rng.uniform(0.3, 0.48) * min(width, CANVAS / 2)
        x = width * place + rng.uniform(radius, width - radius)
        y = rng.uniform(radius, CANVAS - radius)
        fill = tuple(min(255, max(0, value + rng.randint(-20, 20))) for value in COLOURS[colour])
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape == "circle":
            pen.ellipse(box, fill=fill)
        elif shape == "square":
            pen.rectangle(box, fill=fill)
        else:
            pen.polygon([(x, y - radius), (box[0], box[3]), (box[2], box[3])], fill=fill)
    if rng.random() < 0.3:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0.0, 8.0, (CANVAS, CANVAS, 3))
        noisy = np.asarray(picture, np.float32) + noise
        picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    return Scene(picture, things)


def random_scene(rng: random.Random) -> Scene:
    """A scene of one to three things."""
    count = rng.choice((1, 1, 2, 2, 3))
    return draw(tuple((rng.choice(list(COLOURS)), rng.choice(SHAPES)) for _ in range(count)), rng)


def named(thing: Thing) -> str:
    """A thing with its article."""
    return f"{'an' if thing[0][0] in 'aeiou' else 'a'} {thing[0]} {thing[1]}"


def listed(things: tuple[Thing, ...]) -> str:
    """All things as a sentence."""
    names = [named(thing) for thing in things]
    text = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{text[0].upper()}{text[1:]}."


def exchanges(things: tuple[Thing, ...]) -> list[tuple[str, str]]:
    """Questions about things, with their answers."""
    number = len(things)
    count = f"There is {NUMBERS[number]} shape." if number == 1 else f"There are {NUMBERS[number]} shapes."
    found = [
        *((question, listed(things)) for question in ("What is in the picture?", "What do you see?")),
        ("Describe the picture.", listed(things)),
        ("How many shapes are there?", count),
        ("What is on the left?", listed(things[:1])),
        ("What is on the right?", listed(things[-1:])),
    ]
    for shape in SHAPES:
        own = [thing for thing in things if thing[1] == shape]
        if len(own) == 1:
            found.append((f"What colour is the {shape}?", f"The {shape} is {own[0][0]}."))
        found.append((f"Is there a {shape}?", "Yes." if own else "No."))
    return found


def main() -> None:
    """Draw a picture."""
    scene = random_scene(random.Random())
    scene.picture.save(sys.argv[1])
    print(listed(scene.things))


if __name__ == "__main__":
    main()
