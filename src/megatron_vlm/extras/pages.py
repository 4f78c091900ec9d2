"""The HTML pages of all commands: one header and stylesheet (`page.html`), nothing fetched from elsewhere."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from megatron_vlm.files import read_text

FOLDER = Path(__file__).parent
LONGER_SIDE = 360  # pixels of a picture on a page


def render(template: str, **values: Any) -> str:
    """Return the page that a template of this folder makes of the values, each escaped where it stands.

    A template extends `page.html`. Its filter `picture` makes the address of an image, and `tojson` data for
    a script.
    """
    import jinja2  # only who writes a page needs it

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=jinja2.FileSystemLoader(FOLDER)
    )
    environment.globals["file"] = lambda name: read_text(FOLDER / name)
    environment.filters["picture"] = picture_url
    return environment.get_template(template).render(**values)


def key_facts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that every page shows in its header, by dotted key as in a config.yaml."""
    batch, micro_batch = (settings.get(f"train.{name}_batch_size") for name in ("global", "micro"))
    facts = {"model": settings.get("model.hf_path"), "data": settings.get("data.train_data_path")}
    facts |= {
        "batch": f"{batch} in micro batches of {micro_batch}",
        "learning rate": settings.get("optimizer.lr"),
    }
    return {name: str(value) for name, value in facts.items()}


def picture_url(picture: Image.Image) -> str:
    """Return a data URL of the picture as JPEG, at most LONGER_SIDE pixels wide and high."""
    picture = picture.copy()
    picture.thumbnail((LONGER_SIDE, LONGER_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
