"""Read the chat template of a config (`chat_template`)."""

import os
from pathlib import Path

from flow_grpo.errors import UserError, did_you_mean_file, first_line
from flow_grpo.untrusted_files import read_text

MARKERS = ("{{", "{%")  # a template has at least one


def read_chat_template(given: str) -> str:
    """Return the template that a config names or contains; "" if there is none.

    Raises:
        UserError: If it is neither a readable file nor the text of a template.
    """
    if not given or any(marker in given for marker in MARKERS):
        return given
    if not os.path.isfile(given):
        raise UserError(
            "is neither a file nor a template",
            field="chat_template",
            value=given,
            hint=did_you_mean_file(Path(given)),
        )
    try:
        template = read_text(Path(given))
    except OSError as error:
        rule = f"cannot be read: {first_line(error)}"
        raise UserError(rule, field="chat_template", value=given) from error
    if not any(marker in template for marker in MARKERS):
        raise UserError("is a file without a Jinja template", field="chat_template", value=given)
    return template
