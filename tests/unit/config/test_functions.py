from __future__ import annotations

import functools
from pathlib import Path

import pytest

from paceline.config.functions import FunctionNotFound, home_of, name_of, resolve


def reason(name: str, folder: Path | None) -> str:
    with pytest.raises(FunctionNotFound) as caught:
        resolve(name, folder)
    return str(caught.value)


def test_a_module_in_the_folder_precedes_one_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("installed", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pl_twice.py").write_text(f"def where(): return {folder!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    assert resolve("pl_twice:where", tmp_path / "mine")() == "mine"


def test_a_module_is_never_silently_replaced_by_another_of_the_same_name(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pl_again.py").write_text(f"def where(): return {folder!r}\n")
    assert resolve("pl_again:where", tmp_path / "first")() == "first"
    assert resolve("pl_again:where", tmp_path / "first")() == "first"
    assert str(tmp_path / "first" / "pl_again.py") in reason("pl_again:where", tmp_path / "second")


def test_names_may_have_dots_on_both_sides(tmp_path: Path) -> None:
    package = tmp_path / "pl_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text("class Net:\n    @staticmethod\n    def small(): return 'small'\n")
    assert resolve("pl_package.nets:Net.small", tmp_path)() == "small"


@pytest.mark.parametrize("name", ["get_model", ":get_model", "models:", "", ":"])
def test_a_name_without_module_or_function_says_how_to_write_it(name: str) -> None:
    assert reason(name, None) == 'is not a function; write it as "module:name"'


def test_a_missing_module_is_named_with_the_folder_it_should_be_in(tmp_path: Path) -> None:
    assert reason("pl_gone:f", tmp_path) == f"names a module that does not exist: pl_gone.py in {tmp_path}"


def test_a_module_that_the_users_module_cannot_import_is_named(tmp_path: Path) -> None:
    module = tmp_path / "pl_needs.py"
    module.write_text("import math\nimport pl_not_installed\n")
    message = reason("pl_needs:f", tmp_path)
    assert message == (
        "cannot be imported: there is no module pl_not_installed; run: pip install pl_not_installed, or correct the "
        f"name if it is a file of yours ({module}:2)"
    )


def test_an_error_in_the_users_module_has_file_and_line(tmp_path: Path) -> None:
    module = tmp_path / "pl_raises.py"
    module.write_text("def check():\n    raise KeyError('width')\n\ncheck()\n")
    assert reason("pl_raises:f", tmp_path) == f"cannot be imported: KeyError: 'width' ({module}:2)"


def test_a_syntax_error_has_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "pl_syntax.py").write_text("x = 1\ndef f(:\n")
    message = reason("pl_syntax:f", tmp_path)
    assert message.startswith("cannot be imported: SyntaxError: ")
    assert message.endswith(f"({tmp_path / 'pl_syntax.py'}:2)")


def test_an_error_inside_a_library_has_the_users_line(tmp_path: Path) -> None:
    module = tmp_path / "pl_deep.py"
    module.write_text("import json\nsettings = json.loads('{')\n")
    assert reason("pl_deep:f", tmp_path).endswith(f"({module}:2)")


def test_a_missing_function_suggests_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "pl_near.py").write_text("def get_model(): ...\n")
    assert reason("pl_near:get_modle", tmp_path) == (
        "names get_modle, which module pl_near does not have; did you mean get_model?"
    )
    assert reason("pl_near:zzz", tmp_path) == "names zzz, which module pl_near does not have"


def test_a_value_that_cannot_be_called_is_not_a_function(tmp_path: Path) -> None:
    (tmp_path / "pl_value.py").write_text("width = 3\n")
    assert reason("pl_value:width", tmp_path) == "is a int, not a function"


def test_functions_are_named_as_a_config_would_name_them() -> None:
    assert name_of(resolve) == "paceline.config.functions:resolve"
    assert name_of(Path) == f"{Path.__module__}:Path"
    assert name_of(Path.exists).endswith(":Path.exists")
    assert (
        name_of(lambda: None)
        == f"{__name__}:{'test_functions_are_named_as_a_config_would_name_them'}.<locals>.<lambda>"
    )
    assert name_of(functools.partial(resolve)) == "functools:partial()"
    assert name_of(Path().exists).endswith(":Path.exists()")  # a method of one object cannot be imported by name
    assert name_of(Path.cwd).endswith(":Path.cwd")


def test_the_home_of_a_function_is_where_its_module_is_looked_up(tmp_path: Path) -> None:
    package = tmp_path / "pl_home" / "inner"
    package.mkdir(parents=True)
    for path in (
        package.parent / "__init__.py",
        package / "__init__.py",
        package / "nets.py",
        tmp_path / "pl_alone.py",
    ):
        path.write_text("def get(): pass\n")
    for name in ("pl_home:get", "pl_home.inner:get", "pl_home.inner.nets:get", "pl_alone:get"):
        assert home_of(resolve(name, tmp_path)) == tmp_path


def test_what_is_installed_has_no_home() -> None:
    assert [home_of(function) for function in (Path, len, pytest.fixture, functools.partial(len))] == [None] * 4


def test_a_module_that_starts_a_run_when_it_is_imported_is_answered_with_the_fix(tmp_path: Path) -> None:
    script = "import paceline\ndef model(): ...\npaceline.Trainer.start(None)\n"
    (tmp_path / "pl_unguarded.py").write_text(script)
    assert "put the lines that start the run under `if __name__ ==" in reason("pl_unguarded:model", tmp_path)
