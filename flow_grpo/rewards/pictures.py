import base64
import io

from PIL import Image


def png_base64(image: Image.Image) -> str:
    """As it travels: lossless, and quick rather than small."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()
