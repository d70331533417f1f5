"""What a release would be: its metadata promise what exists, and what is built from it works."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import venv
import zipfile
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

import penstock
from lab.architecture import statements_of
from penstock import errors
from penstock.cli.entry import main
from penstock.config import parse_config
from penstock.doctor import checks
from penstock.movers.compiled import library_path
from tests.serve.conftest import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SERVER = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {"dev", "all", "docs"}
"""Extras for people who change Penstock, and the sum of the others."""

NOT_IN_ALL = {
    "demo": "a part of others",
    "mooncake": "its wheel needs RDMA libraries of the system",
    "testing": "for tests of other distributions",
}
IMPORTED_AS = {
    "mooncake": "mooncake-transfer-engine",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
}
NOT_OURS = {
    "cuda": "comes with torch for CUDA",
    "huggingface_hub": "comes with transformers",
    "llama_cpp": "whoever gives us a model of it has it",
    "prometheus-client": "comes with SGLang, whose page it is for",
    "sglang": "imports us, from its own environment",
    "transformers": "whoever gives us a model of it has it",
    "triton": "comes with torch for CUDA",
    "vllm": "imports us, from its own environment",
}
"""Packages that the code imports and no extra installs, and why."""

FOUND_BY_NAME = {
    "mooncake-transfer-engine",
    "nixl",
    "opentelemetry-exporter-otlp-proto-http",
}
"""Packages that are imported by a name in a string, or lie within the name of another one."""

SHIPPED = ("src", "server", "docs", "examples", "deploy")
"""Folders with texts that users read."""

LIMIT_S = 600.0
PROJECT_VERSION = penstock.__version__
WHEEL_BYTES_MAX = 2 << 20
"""It has 1.6 MB, mostly two traces."""


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0]


def declared(project: dict[str, Any]) -> set[str]:
    """What a wheel depends on, with its extras; the server has what the library always has."""
    extras = project["optional-dependencies"]
    optional = [each for name, extra in extras.items() if name not in OWN for each in extra]
    always = [*PROJECT["dependencies"], *project["dependencies"]]
    return {name_of(each) for each in [*always, *optional]} - {"penstock"}


@cache
def imported(package: Path) -> frozenset[str]:
    """The distributions that a package imports, anywhere."""
    modules: set[str] = set()
    for path in package.rglob("*.py"):
        for node in statements_of(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module)
    tops = {module.partition(".")[0] for module in modules} - {"penstock", "penstock_serve"}
    return frozenset(
        IMPORTED_AS.get(top, top) for top in tops if top not in sys.stdlib_module_names
    )


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


WHEELS = {
    "penstock": (PROJECT, ROOT / "src" / "penstock"),
    "penstock-serve": (SERVER, ROOT / "server" / "src" / "penstock_serve"),
}


@pytest.mark.parametrize("name", WHEELS)
def test_what_is_imported_is_installed_by_an_extra(name: str) -> None:
    project, package = WHEELS[name]

    # Every wheel of the two commands has typer, from the extra that the server asks for.
    wanted = declared(project) | set(map(name_of, EXTRAS["cli"]))
    assert imported(package) - wanted <= NOT_OURS.keys()


@pytest.mark.parametrize("name", WHEELS)
def test_what_an_extra_installs_is_imported(name: str) -> None:
    project, package = WHEELS[name]

    own = declared(project) - (set() if project is PROJECT else declared(PROJECT) - {"torch"})
    assert own - imported(package) <= FOUND_BY_NAME


def test_the_extra_with_everything_has_every_extra() -> None:
    listed = set(re.findall(r"[\w-]+", EXTRAS["all"][0]))

    assert EXTRAS.keys() - OWN - listed <= NOT_IN_ALL.keys()
    assert listed - {"penstock"} <= EXTRAS.keys()


def test_what_the_tests_use_is_pinned() -> None:
    extras = [each for extra in SERVER["optional-dependencies"].values() for each in extra]
    asked = [*PROJECT["dependencies"], *EXTRAS["dev"], *SERVER["dependencies"], *extras]
    wanted = {name_of(each) for each in asked}

    assert wanted - {"penstock"} <= pinned().keys()


def test_the_version_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    assert main(["--version"]) == 0
    printed = capsys.readouterr().out.strip()

    assert PROJECT["version"] == penstock.__version__ == cited["version"]
    assert SERVER["version"] == PROJECT["version"]
    assert f"penstock[cli]=={PROJECT['version']}" in SERVER["dependencies"]
    assert printed == f"penstock {PROJECT['version']}"


def test_no_text_advises_to_install_penstock_from_an_index_before_there_is_a_release() -> None:
    """A release changes `penstock.errors.INSTALL`, and this test with the pages."""
    shipped = [
        *ROOT.glob("*.md"),
        *(path for folder in SHIPPED for path in (ROOT / folder).rglob("*.*")),
    ]
    texts = {
        path: path.read_bytes().decode("utf-8", errors="replace")
        for path in shipped
        if path.is_file() and path.suffix != ".pyc"
    }
    named = re.compile(r"""pip3? install (-\S+ )*["']?penstock\b(?![-_])""")

    assert errors.install_hint("cli") == 'pip install ".[cli]" in a clone of the repository'
    assert [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path, text in texts.items()
        for found in named.finditer(text)
    ] == []
    # Messages take it from one place.
    package = ROOT / "src" / "penstock"
    assert [
        str(path.relative_to(package))
        for path, text in texts.items()
        if path.suffix == ".py" and re.search(r"""pip install ["']?\.\[""", text)
    ] == ["errors.py"]


@pytest.mark.parametrize(("package", "tested"), checks.TESTED_PACKAGES.items())
def test_the_doctor_knows_the_versions_that_are_tested(
    package: str, tested: tuple[int, ...]
) -> None:
    # Mooncake is tested with its wheel for machines without CUDA.
    version = pinned().get(package) or pinned()[f"{package}-non-cuda"]

    assert version.split(".")[: len(tested)] == [str(part) for part in tested]


def test_the_doctor_and_the_container_know_the_vllm_that_is_tested() -> None:
    tested = ".".join(str(part) for part in checks.TESTED[0])
    environment = (ROOT / ".ci" / "vllm-environment").read_text(encoding="utf-8")
    container = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")

    assert f"{tested}." in environment
    assert f"vllm-openai:v{tested}." in container


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text(encoding="utf-8")))


def test_the_pod_has_a_file_that_is_read_and_the_flag_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, service, stateful = documents("kubernetes/vllm.yaml")
    text = settings["data"]["penstock.toml"]
    pod = stateful["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    arguments = container["args"]
    flag = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])

    parse_config(text)
    (tmp_path / "penstock.toml").write_text(text, encoding="utf-8")
    assert main(["vllm-config", str(tmp_path / "penstock.toml"), "--bare"]) == 0
    printed = json.loads(capsys.readouterr().out)

    printed["kv_connector_extra_config"]["config"] = "/etc/penstock/penstock.toml"
    assert flag == printed
    assert container["volumeMounts"][0]["mountPath"] == "/etc/penstock"
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    in_memory = [tier for tier in tomllib.loads(text)["tiers"] if tier["kind"] != "disk"]
    assert limit >= sum(tier["gib"] for tier in in_memory) + 16
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_issue_forms_can_be_read() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

    read = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in forms}

    assert {"bug", "wish"} <= read.keys()
    assert all(read[name]["body"] for name in ("bug", "wish"))


@pytest.fixture(scope="module")
def wheels() -> dict[str, Path]:
    """Those of the library and of the server, by their names."""
    made = subprocess.run(
        ["make", "dist"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    found = {path.name.partition("-")[0]: path for path in (ROOT / "build" / "dist").glob("*.whl")}
    assert found.keys() == {"penstock", "penstock_serve"}
    return found


@pytest.fixture(scope="module")
def wheel(wheels: dict[str, Path]) -> Path:
    return wheels["penstock"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "source"), [("penstock", "src"), ("penstock_serve", "server/src")]
)
def test_a_wheel_has_its_package_with_types_and_data_and_no_other(
    wheels: dict[str, Path], name: str, source: str
) -> None:
    wheel = wheels[name]
    names = zipfile.ZipFile(wheel).namelist()
    package = (ROOT / source / name).rglob("*")
    files = {path for path in package if path.is_file() and path.parent.name != "__pycache__"}

    assert {str(path.relative_to(ROOT / source)) for path in files} <= set(names)
    assert f"{name}/py.typed" in names
    assert {each.partition("/")[0].partition("-")[0] for each in names} == {name}
    assert not [name for name in names if name.startswith(("lab/", "tests/", "docs/"))]
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    libraries = [library_path().name] if name == "penstock" else []
    assert [path.rpartition("/")[2] for path in names if path.endswith(".so")] == libraries
    platform = "manylinux_2_[0-9]+_[a-z0-9_]+" if libraries else "any"
    assert re.search(f"-py3-none-{platform}[.]whl$", wheel.name)
    assert wheel.stat().st_size < WHEEL_BYTES_MAX


def install(wheel: Path, folder: Path) -> Path:
    """Makes an environment with the wheel; the path of its Python.

    What Penstock depends on comes from here, `penstock` itself from the wheel, which is first.
    """
    venv.create(folder, with_pip=False)
    (site,) = (folder / "lib").glob("*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others), encoding="utf-8")
    return folder / "bin" / "python"


@pytest.mark.long
def test_what_is_installed_runs_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    python = install(wheel, tmp_path / "environment")
    empty = tmp_path / "empty"
    empty.mkdir()

    def penstock_says(*words: str) -> str:
        ended = subprocess.run(
            [python, "-m", "penstock", *words],
            cwd=empty,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, ""), words
        return ended.stdout

    assert penstock_says("--version") == f"penstock {PROJECT_VERSION}\n"
    assert json.loads(penstock_says("doctor", "--json", "-"))["penstock"] == PROJECT_VERSION
    assert "conversation" in penstock_says("replay", "--help")
    # Nothing is compiled there.
    loaded = subprocess.run(
        [python, "-c", "import penstock.movers.compiled as found; found.load_library()"],
        cwd=empty,
        env={**os.environ, "CC": "/no/compiler"},
        timeout=LIMIT_S,
        check=False,
    )
    assert loaded.returncode == 0
    alone = [python, "-P", "-m", "penstock", "serve"]
    served = subprocess.run(
        alone, cwd=empty, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert served.returncode == 3
    assert served.stderr.startswith("penstock: serve is part of penstock-serve: pip install ")
    assert not list(empty.iterdir())


@pytest.mark.long
def test_the_list_of_what_is_installed_names_versions_and_no_place(wheels: dict[str, Path]) -> None:
    text = (ROOT / "build" / "sbom.cdx.json").read_text(encoding="utf-8")
    found = {each["name"]: each["version"] for each in json.loads(text)["components"]}

    assert wheels.keys() <= {name.replace("-", "_") for name in (*found, "penstock-serve")}
    assert found["penstock"] == PROJECT_VERSION
    always = {name_of(each) for each in PROJECT["dependencies"]}
    assert {name: found[name] for name in always} == {name: pinned()[name] for name in always}
    assert str(ROOT) not in text


@contextmanager
def running(command: list[str | Path], folder: Path) -> Iterator[str]:
    """What a command of ours serves, until it has ended by SIGTERM."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            found = re.match(r"penstock: .*(http://127\.0\.0\.1:\d+)", line)
            if found:
                yield found[1]
                break
        else:
            raise AssertionError("".join(said))
        process.terminate()
        process.communicate(timeout=LIMIT_S)
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.long
def test_both_wheels_alone_route(wheels: dict[str, Path], tmp_path: Path) -> None:
    """In the environment of `make dist`, which has what the wheels ask for: no torch, no clone."""
    assert wheels
    installed = ROOT / "build" / "installed" / "bin" / "penstock"
    command = [installed, "router", "--port", "0", "--vllm-decode", "http://127.0.0.1:9"]

    with running([*command], tmp_path) as address:
        answer = httpx.get(f"{address}/health", timeout=LIMIT_S)

    assert answer.status_code == 503
    assert "http://127.0.0.1:9" in answer.text


@pytest.mark.long
def test_both_wheels_with_an_engine_serve(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = install(wheels["penstock"], tmp_path / "environment")
    (site,) = (tmp_path / "environment" / "lib").glob("*/site-packages")
    zipfile.ZipFile(wheels["penstock_serve"]).extractall(site)
    make_checkpoint(tmp_path / "model")
    serve = [python, "-P", "-m", "penstock", "serve", "--port", "0", "--blocks", "64"]

    with running([*serve, "--model", tmp_path / "model"], tmp_path) as address:
        answer = httpx.post(
            f"{address}/v1/completions", json={"prompt": "a b c", "max_tokens": 4}, timeout=LIMIT_S
        )

    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_only_a_person_publishes_and_no_password_is_kept() -> None:
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    # YAML 1.1 reads the key `on` as true.
    workflow = yaml.safe_load(text)
    jobs = workflow["jobs"]

    assert workflow[True].keys() == {"workflow_dispatch"}
    assert workflow["permissions"] == {}
    assert "secrets." not in text
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"] == "pypi"
    assert {"run": "make dist"} in jobs["build"]["steps"]
    assert not [step for step in jobs["publish"]["steps"] if "run" in step]


@pytest.mark.long
def test_the_types_serve_a_program_of_a_user(tmp_path: Path) -> None:
    """As in an environment with the package and what it always needs, no extra beside it."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    (site,) = (environment / "lib").glob("*/site-packages")
    for module in ("penstock", "msgspec", "numpy", "xxhash", "zmq"):
        (place,) = import_module(module).__path__
        (site / module).symlink_to(place)
    (tmp_path / "user.py").write_text(
        "import penstock\n"
        'cache = penstock.open(penstock.parse_config("version = 1"))\n'
        "lease = cache.acquire([1, 2, 3])\n"
        "count: int = lease.cached_tokens\n"
        "wrong: str = lease.cached_tokens\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={os.devnull}"]
    command += ["--python-executable", str(environment / "bin" / "python"), "user.py"]

    checked = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    found = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert len(found) == 1, checked.stdout
    assert found[0].startswith("user.py:5: error: Incompatible types in assignment")
