"""What the small model was taught to draw: shapes, and colours by their names, in [0, 1]."""

SHAPES = ("circle", "square", "triangle")
RGB = {
    "red": (0.86, 0.10, 0.12),
    "orange": (0.98, 0.55, 0.08),
    "yellow": (0.95, 0.88, 0.12),
    "green": (0.12, 0.62, 0.22),
    "blue": (0.12, 0.28, 0.86),
    "purple": (0.52, 0.16, 0.68),
}
