"""The committed OpenAPI schema is up to date and describes all responses."""

import json
import re
from collections.abc import Callable

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from server_process import GOOD, ROOT, Server, body

from reward_server.app import openapi
from reward_server.errors import STATUS_BY_CODE

FILE = ROOT / "reward_server" / "openapi.json"
TOKEN = "a-token"
schema = schemathesis.openapi.from_dict(json.loads(FILE.read_text()))


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("jpeg_compressibility,obey", "--token-env", "TOKEN", TOKEN=TOKEN)


def test_the_schema_in_the_repository_is_up_to_date() -> None:
    assert json.loads(FILE.read_text()) == openapi(), (
        "python -m reward_server --print-openapi > reward_server/openapi.json"
    )


def test_every_error_code_is_documented_with_its_status() -> None:
    responses = openapi()["paths"]["/v1/score"]["post"]["responses"]
    documented = {
        code: int(status)
        for status, response in responses.items()
        if status != "200"
        for code in response["description"].split(", ")
    }
    # of unknown routes and of /readyz
    elsewhere = {"not_found", "method_not_allowed", "reward_down"}
    assert documented == {code: s for code, s in STATUS_BY_CODE.items() if code not in elsewhere}


@settings(
    max_examples=75,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
def check_responses(case: schemathesis.Case, server: Server) -> None:
    if isinstance(case.body, dict) and case.body.get("images"):
        # Random text is never an image: give half of the requests valid ones.
        images = case.body["images"]
        if isinstance(images, list) and len(str(images)) % 2:
            case.body = {**case.body, **body("obey", *["x"] * len(images), image=GOOD)}
    case.call_and_validate(
        base_url=server.url,
        session=server.session,
        headers={"Authorization": f"Bearer {TOKEN}"},
        excluded_checks=[positive_data_acceptance],  # not every string is an image
        timeout=30,
    )


# one test function per operation: schemathesis gives the operations of one function the same node
# ID, and pytest-xdist would run only one of them
OPERATIONS = [(path, method) for path, methods in openapi()["paths"].items() for method in methods]
for _path, _method in OPERATIONS:
    _name = re.sub(r"\W+", "_", f"test_responses_of_{_method}{_path}_conform_to_the_schema")
    _operation = schema.include(path=_path, method=_method.upper())
    globals()[_name] = _operation.parametrize()(check_responses)


def test_every_operation_has_one_test() -> None:
    names = [name for name in globals() if name.startswith("test_responses_of_")]
    assert len(names) == len(OPERATIONS) == 6
