"""transformers is imported without scipy, torch.distributed.tensor and torch's compiler, which work afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import gguf_models

HEAVY = ("scipy.optimize", "torch._dynamo", "torch.distributed.tensor", "sympy")


def run(program: str) -> list[str]:
    """The words that a program prints in a process of its own, where nothing is imported yet."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_model_family_is_imported_without_what_only_training_and_compiling_need() -> None:
    loaded = run(
        "import sys\n"
        "from workers.adapters.registry import resolve\n"
        "resolve('causal')\n"
        "import workers.adapters.shared.gguf_weights, transformers.models.llama.modeling_llama\n"
        f"print('transformers.modeling_utils' in sys.modules, *(n for n in {HEAVY} if n in sys.modules))"
    )
    assert loaded == ["True"]


@pytest.mark.long
def test_torch_compiles_and_exports_behind_the_import() -> None:
    program = """
import sys
from workers.libraries import import_transformers, without_compiler
import_transformers()
import torch
with without_compiler():
    marked = torch._dynamo.disable(lambda x: x + 1, recursive=True)
    print(marked(1), "torch._dynamo" in sys.modules)
print("torch._dynamo" in sys.modules)
compiled = torch.compile(lambda x: marked(x) * 2, backend="eager")
print(int(compiled(torch.ones(()))), torch._dynamo.__file__ is not None, marked(2))
with without_compiler():
    print(torch._dynamo.__file__ is not None)
program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
print(type(program).__name__)
"""
    assert run(program) == ["2", "True", "False", "4", "True", "3", "True", "ExportedProgram"]


@pytest.mark.long
def test_another_name_of_the_compiler_brings_the_real_module_while_the_stand_in_is_there() -> None:
    program = """
import sys
from workers.libraries import without_compiler
import torch
with without_compiler():
    stand_in = sys.modules["torch._dynamo"]
    print(callable(torch._dynamo.reset), sys.modules["torch._dynamo"] is stand_in)
    import torch._dynamo.utils
    print(torch._dynamo is stand_in)
print(torch._dynamo.__file__ is not None)
"""
    assert run(program) == ["True", "False", "False", "True"]


@pytest.mark.long
def test_masks_out_of_functions_are_made_as_ever() -> None:
    program = """
from workers.libraries import import_transformers
import_transformers()
import torch
from transformers import masking_utils
mask = torch.tensor([[True, False], [True, True]])
with masking_utils.TransformGetItemToIndex():
    print(bool(torch.vmap(lambda at: mask[at, 0])(torch.arange(2)).all()))
"""
    assert run(program) == ["True"]


@pytest.mark.long
def test_the_names_of_models_are_those_that_transformers_finds_by_itself() -> None:
    program = """
from workers.libraries import import_transformers
import_transformers()
import transformers
from transformers.utils import import_utils
place = transformers.models.__file__
quick = {form: import_utils.define_import_structure(*form) for form in ((place,), (place, "models"))}
fetch, scan = import_utils.fetch__all__, import_utils.create_import_structure_from_path
print(fetch.__module__ == scan.__module__ == import_utils.__name__)
scan.cache_clear()
slow = {form: import_utils.define_import_structure.__wrapped__(*form) for form in quick}
print(slow == quick, len(next(iter(slow.values()))) > 3)
"""
    assert run(program) == ["True", "True", "True"]


@pytest.mark.long
def test_the_model_of_a_gguf_file_is_built_without_sympy(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_models.write(path)
    program = f"""
import sys
from pathlib import Path
from workers.adapters.registry import building, resolve
resolve("causal")
from workers.adapters.shared import gguf_weights
from workers.loading.gguf_file import read_model
import torch
stored = read_model(Path({str(path)!r}))
with building("causal"):
    gguf_weights.build(stored, gguf_weights.config_of(stored), torch.float32, lambda phase, part: None)
print("sympy" in sys.modules)
"""
    assert run(program) == ["False"]
