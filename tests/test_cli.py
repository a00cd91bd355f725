"""The command line: models by name, what is printed and where, and the exit status."""

import errno
import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import te_transform
from te_transform.command_line.explain import explanation
from te_transform.command_line.main import main
from te_transform.execution import timing
from te_transform.graph.keywords import ArgumentError
from te_transform.load import LoadError, load
from te_transform.pipeline import PIPELINE
from te_transform.plan.rule import Rule

FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))

class Counts(Block):
    def __init__(self):
        super().__init__()
        self.norm.weight.data *= self.norm.weight.sum().item()

class Branches(Block):
    def forward(self, x):
        x = super().forward(x)
        return x if x.sum() > 0 else -x

def two():
    return nn.Sequential(Block(), Block())

def number():
    return 3

def head():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4097))

class TinyForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.block = nn.Embedding(32, 16), Block()

    def forward(self, ids):
        return self.block(self.words(ids))

def prints():
    print("reading weights")
    return two()

def scripted():
    return torch.jit.script(two())

def exits():
    raise SystemExit(3)

def fails():
    raise RuntimeError("no weights here\\nand no more")

class ReadsDict(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)

    def forward(self, batch):
        return super().forward(batch["x"]) + batch["shift"]


def with_inputs():
    return two(), torch.zeros(2, 4, 16)

def of_width(width):
    return nn.LayerNorm(width)

class made:
    model = Block()

class Exits(Block):
    def forward(self, x):
        raise SystemExit(0)

class Stop(BaseException):
    pass

class Stops(Block):
    def forward(self, x):
        raise Stop("enough")

def stops():
    raise Stop("enough")

class Unreadable(Exception):
    def __str__(self):
        raise ValueError

class Fails(Block):
    def forward(self, x):
        raise Unreadable

class FailsInTrain(Block):
    def train(self, mode=True):
        raise Unreadable

def lazy():
    return nn.LazyLinear(16)

def on_meta():
    return two().to("meta")

class Port(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU("tanh"), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.mlp(self.ln(x))

def wrong():
    port = Port()
    port.ln.eps = 0.1
    return port

def to_port(state):
    new = {"norm": "ln", "up": "mlp.0", "down": "mlp.2"}
    return {f"{new[name.split('.')[0]]}.{name.split('.')[1]}": held for name, held in state.items()}

class Chooses(Block):
    def forward(self, x):
        return super().forward(x[(x > 0).any(-1).nonzero()[:, 0]])
"""


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> Path:
    """Return the working folder, with a module of models and the config of a Llama."""
    (working_folder / "models_of_mine.py").write_text(FACTORY)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=12, max_position_embeddings=32, architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(working_folder / "llama")
    return working_folder


def written(folder: Path, **changed: Any) -> str:
    """The config of a Llama, with other entries."""
    told = json.loads((folder / "llama/config.json").read_text()) | changed
    file = folder / "other.json"
    file.write_text(json.dumps(told))
    return str(file)


def saved(folder: Path, kind: str, **told: Any) -> str:
    """The config of a small model of another kind."""
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": 64, "hidden_size": 32} | told)
    config.save_pretrained(folder / kind)
    return str(folder / kind)


def python(folder: Path, name: str, code: str) -> str:
    (folder / f"{name}.py").write_text(code)
    return f"{name}:two"


def listed(folder: Path) -> str:
    """A file of JSON that is no config."""
    (folder / "list.json").write_text("[1]")
    return str(folder / "list.json")


@pytest.mark.usefixtures("at_any_size")
def test_inspect_a_config(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    page = folder / "page.html"
    assert main(["inspect", "llama", "--recipe", "fp8-delayed", "--html", str(page)]) == 0
    told, errors = capsys.readouterr()
    assert "layernorm_mlp         12       12   model.layers.{0..11}.mlp  x12" in told
    assert "note: in fp8-delayed: " in told
    assert "input_ids=int64[2, 32], labels=int64[2, 32]" in told  # as many as there are positions for
    assert errors == ""
    assert "<html" in page.read_text()


def test_inspect_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--layers", "2", "--dtype", "bfloat16", "--recipe", "fp8-current"]
    assert main(["inspect", "llama/config.json", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fused"]["layernorm_mlp"] == 2
    assert {site["rule"] for site in told["sites"]} <= {rule.name for rule in PIPELINE}
    assert told["precision"]["model.layers.0.mlp"] is None
    assert told["memory"]["peak"] > 0


@pytest.mark.parametrize("inference", [pytest.param(False, marks=pytest.mark.integration), True])
def test_inspect_predicts_times(capsys: pytest.CaptureFixture[str], inference: bool) -> None:
    mode = ["--inference"] if inference else []
    assert main(["inspect", "llama", "--layers", "1", "--dtype", "bfloat16", "--times", *mode]) == 0
    told = capsys.readouterr().out
    assert "predicted" in told
    assert ("labels=" in told) != inference
    assert main(["inspect", "llama", "--layers", "1", "--dtype", "bfloat16", "--times", "--json", *mode]) == 0
    times = json.loads(capsys.readouterr().out)["times"]
    assert len(times) > 4
    assert all(each["seconds"] > 0 for each in times if not each["why"].startswith("not"))


@pytest.mark.usefixtures("compilations")
def test_tune_keeps_the_fastest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, timings_file: Path
) -> None:
    arguments = ["tune", "models_of_mine:two", "--input", "2x4x16", "--inference"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert len(re.findall(r": [\d.]+ (?:us|ms|s)", told)) >= 2
    assert told.count(", chosen") == 1
    assert str(timings_file) in told
    monkeypatch.setattr(timing, "seconds_of", None)  # nothing is timed again
    assert main(arguments) == 0
    assert capsys.readouterr().out == told


class Full(io.StringIO):
    """A file on a disk that is full: what was written is missed when it is flushed."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_output_that_cannot_be_written_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with redirect_stdout(Full()):
        assert main(["inspect", "models_of_mine:two"]) == 2
    assert capsys.readouterr().err == "te-transform: [Errno 28] No space left on device\n"


def test_expectations_decide_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "models_of_mine:two", "--expect", "layernorm_mlp=2", "linear=0"]) == 0
    assert main(["inspect", "models_of_mine:two", "--expect", "layernorm_mlp=3"]) == 1
    assert "layernorm_mlp: expected 3, found 2" in capsys.readouterr().err
    assert main(["inspect", "models_of_mine:two", "--expect", "layernorm_mlp=3", "--expect", "linear=0"]) == 1


def test_warnings_of_dynamo_are_hidden(recwarn: pytest.WarningsRecorder, folder: Path) -> None:
    sizes = {
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    name = saved(folder, "Mixtral", **sizes, architectures=["MixtralForCausalLM"])
    assert main(["inspect", name, "--length", "4"]) == 0
    assert [each for each in recwarn if "lru_cache" in str(each.message)] == []


def test_a_page_that_this_user_may_not_write_is_said_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te_transform.command_line.main.os.access", lambda path, mode: False)
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", "nothing", "--html", "page.html"])
    assert (
        "expected a writable file, got 'page.html', which cannot be written by this user"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["models_of_mine:two", "models_of_mine:made.model", "models_of_mine:Counts"])
@pytest.mark.usefixtures("as_given")
def test_verify_a_factory(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", name, "--length", "4"]) == 0
    assert "verified, " in capsys.readouterr().out


def test_verify_writes_what_each_place_is_off(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = [
        "verify",
        "models_of_mine:two",
        "--length",
        "4",
        "--json",
        "--html",
        str(folder / "page.html"),
    ]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verified"]
    for site in told["sites"]:
        names = [off["name"] for off in site["deviations"]]
        assert names[0] == "output"
        assert f"gradient of {site['path']}.up.weight" in names
        assert all(off["converted"] <= off["allowed"] for off in site["deviations"])
    assert "gradient of 0.up.weight: " in (folder / "page.html").read_text()


def test_a_recipe_that_has_no_emulation_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any) -> None:
        raise ArgumentError("there is no emulation of this recipe")

    monkeypatch.setattr("te_transform.command_line.commands.verify", cannot)
    assert main(["verify", "models_of_mine:two", "--length", "4"]) == 2
    assert capsys.readouterr().err == "te-transform: there is no emulation of this recipe\n"


@pytest.mark.integration  # test_tune_keeps_the_fastest tunes a module
def test_tune_a_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, timings_file: Path
) -> None:
    monkeypatch.setattr(timing, "seconds_of", lambda model, sample: 1.0)
    assert main(["tune", "llama", "--layers", "1", "--length", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] == "as it is"
    assert {each["seconds"] for each in told["times"]} == {1.0}


def test_stacks_of_the_capture_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "models_of_mine:two", "--input", "2x4x7"]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("te_transform ")


PORT = ["verify", "models_of_mine:Block", "--against", "models_of_mine:Port", "--input", "2x3x16"]
NAMES = ["--names", "norm=ln", "up=mlp.0", "--names", "down=mlp.2"]


def test_verify_two_factories(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PORT, *NAMES]) == 0  # drawn with the same seed, in the same order
    assert "Block and Port: verified, " in capsys.readouterr().out
    wrong = [*PORT[:3], "models_of_mine:wrong", *PORT[4:], "--copy-weights", "--json"]
    assert main([*wrong, "--weights", "models_of_mine:to_port", "--names", "norm=ln"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["guilty"] == ["norm"]
    assert told["failed"][0].startswith("example inputs, training: output has an error of")


def test_verify_other_weights_names_the_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "from torch import nn\n\ndef first():\n    return nn.Linear(4, 4)\n\n"
        "def two():\n    nn.Linear(4, 4)\n    return nn.Linear(4, 4)"
    )
    second = python(folder, "drawn", code)
    compared = ["verify", "drawn:first", "--against", second, "--input", "2x4"]
    assert main(compared) == 1
    assert capsys.readouterr().err.endswith(
        "to compare with the first model's weights, pass --copy-weights\n"
    )
    assert main([*compared, "--copy-weights"]) == 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "te-transform: --names, --weights: expected the same weights in both models"),
        (["--names", "norm"], "expected OLD=NEW for --names, got 'norm'"),
        (["--recipe", "fp8-delayed"], "expected no options of a conversion with --against"),
        (["--against", "models_of_mine:on_meta"], "got parameters on the meta device in the second model"),
        (["--weights", "models_of_mine:nothing"], "expected package.module:factory that can be imported"),
    ],
)
def test_two_factories_that_do_not_fit(
    more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PORT, *more]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--backend", "te"], "--backend: expected Transformer Engine .*; choose backend 'torch' or 'auto'"),
        (["--recipe", "fp8-delayed"], "--recipe: expected backend 'te' .*, or leave out the recipe"),
        (["--recipe", "fp7"], "--recipe: expected None, a TE recipe or one of .* got 'fp7'"),
        (["--skip", "layers.9"], "--skip: expected a path like .*, got 'layers.9'"),
    ],
)
def test_errors_name_options_not_arguments(
    options: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "models_of_mine:Block", "--input", "2x3x16", *options]) == 2
    told = capsys.readouterr().err
    assert re.match(f"te-transform: {advice}", told)
    assert not re.search(r"\b(backend|recipe|skip|names|weights)=", told)


def test_names_without_a_second_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PORT[:2], *NAMES]) == 2
    assert "expected --names, --weights and --copy-weights with --against" in capsys.readouterr().err


@pytest.mark.integration  # test_verify.py finds what is not the same
@pytest.mark.usefixtures("as_given")
def test_different_numbers_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        x = torch.zeros(2, 4, 16, device=next(model.parameters()).device)
        found = te_transform.convert(model, x, verify=False)
        found.register_forward_hook(lambda module, args, out: out * 1.01)
        return found

    monkeypatch.setattr("te_transform.command_line.commands.convert", scaled)
    assert main(["verify", "models_of_mine:two", "--length", "4"]) == 1
    assert "NOT the same" in capsys.readouterr().out


def test_inputs_may_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "models_of_mine:two", "--input", "3x5x16"]) == 0
    assert "(float32[3, 5, 16])" in capsys.readouterr().out
    assert main(["inspect", "models_of_mine:two", "--dtype", "bfloat16", "--input", "3x5x16"]) == 0
    assert "(bfloat16[3, 5, 16])" in capsys.readouterr().out
    ids = ["--input", "input_ids=2x6:int64:64", "--input", "attention_mask=2x6:bool"]
    assert main(["inspect", "llama", "--layers", "1", *ids]) == 0
    assert "(input_ids=int64[2, 6], attention_mask=bool[2, 6], use_cache=False)" in (
        " ".join(capsys.readouterr().out.split())
    )


def test_padding_a_vocabulary_may_be_allowed() -> None:
    asked = ["inspect", "models_of_mine:head", "--expect", "pad_vocabulary=1"]
    assert [main(asked), main([*asked, "--pad-vocabulary"])] == [1, 0]


def test_a_language_model_of_ones_own_has_no_labels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "models_of_mine:TinyForCausalLM", "--length", "4"]) == 0
    assert "(int64[2, 4])" in " ".join(capsys.readouterr().out.split())


def test_output_of_a_factory_is_no_part_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "models_of_mine:prints", "--input", "2x4x16", "--json"]) == 0
    told, errors = capsys.readouterr()
    assert json.loads(told)["fused"] == {"layernorm_mlp": 2}
    assert errors == "reading weights\n"


def test_a_config_without_a_number_of_positions_takes_any_length(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    sizes = {"d_model": 32, "d_head": 16, "n_layer": 1, "n_head": 2, "d_inner": 64}
    name = saved(folder, "XLNet", **sizes, architectures=["XLNetLMHeadModel"])  # has -1 positions
    assert main(["inspect", name, "--length", "4"]) == 0
    assert "input_ids=int64[2, 4]" in capsys.readouterr().out


def whisper(folder: Path) -> str:
    sizes = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8}
    positions = {"max_source_positions": 16, "max_target_positions": 12}
    speech = {"architectures": ["WhisperForConditionalGeneration"], "pad_token_id": 0}
    return saved(folder, "Whisper", **sizes, **positions, **speech)


@pytest.mark.integration
def test_a_row_has_as_many_tokens_as_a_decoder_has_positions(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["inspect", whisper(folder), "--layers", "1", "--expect", "layernorm_mlp=2"]) == 0
    assert "decoder_input_ids=int64[2, 12]" in " ".join(capsys.readouterr().out.split())


def test_a_row_has_no_more_tokens_than_a_decoder_or_the_text_beside_images_has_positions(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["inspect", whisper(folder), "--length", "13"]) == 2
    assert "expected --length of at most 12 (max_target_positions)" in capsys.readouterr().err
    text = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 12}
    llava = {"text_config": text, "architectures": ["LlavaForConditionalGeneration"]}
    assert main(["inspect", saved(folder, "Llava", **llava), "--length", "13"]) == 2
    assert "expected --length of at most 12 (max_position_embeddings)" in capsys.readouterr().err


def test_layers_of_a_config_whose_kinds_of_layers_follow_from_their_number(folder: Path) -> None:
    name = saved(folder, "Mamba", num_hidden_layers=3, architectures=["MambaForCausalLM"])
    assert len(load(name, on_meta=True, layers=1).backbone.layers) == 1


def test_a_forward_that_branches_on_values_is_inspected_with_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", "models_of_mine:Branches", "--input", "2x4x16"]) == 0
    told = capsys.readouterr().out
    assert "Data-dependent branching" in " ".join(told.split())
    assert "1 site fused" in told


def test_a_forward_whose_sizes_are_values_is_inspected_with_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As mixtures of experts that list the tokens of each expert."""
    assert main(["inspect", "models_of_mine:Chooses", "--input", "4x16"]) == 0
    assert "1 site fused" in capsys.readouterr().out


def test_a_factory_has_the_dtype_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "models_of_mine:two", "--length", "4", "--dtype", "bfloat16"]) == 0
    assert "(bfloat16[2, 4, 16])" in capsys.readouterr().out
    assert next(load("models_of_mine:two", dtype=torch.float16).parameters()).dtype is torch.float16


def test_the_command_line_plans_what_inspect_plans(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["inspect", "llama", "--layers", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    report = te_transform.inspect(load("llama", on_meta=True, layers=1))
    assert told["fused"].items() >= report.counts.items()
    assert report.options[0] == "backend='torch'" or torch.cuda.is_available()
    assert [note for note in told["notes"] if note.startswith("backend ")] == [
        note for note in report.notes if note.startswith("backend ")
    ]


def test_weights_beside_a_config_are_read(folder: Path) -> None:
    model = load("llama")
    model.save_pretrained(folder / "llama")
    again = load("llama")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert next(load("llama", on_meta=True).parameters()).is_meta
    assert next(load("llama", dtype=torch.float16, layers=1).parameters()).dtype is torch.float16


class Harm:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("harm"),)


def test_weights_of_torch_save_are_read_if_they_are_tensors_alone(folder: Path) -> None:
    weights = {name: torch.full_like(held, 0.5) for name, held in load("llama").state_dict().items()}
    torch.save(weights, folder / "llama/pytorch_model.bin")
    assert all((parameter == 0.5).all() for parameter in load("llama").parameters())
    torch.save({"model.norm.weight": Harm()}, folder / "llama/pytorch_model.bin")
    with pytest.raises(
        LoadError, match="got a pickle of more than tensors, which would run code; save safetensors"
    ):
        load("llama")
    assert not (folder / "harm").exists()


def test_code_beside_a_config_runs_if_it_is_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "cache"))
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n\nclass OwnConfig(LlamaConfig):\n    pass\n"
    )
    code += "\nclass Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    (folder / "llama/own_code.py").write_text(code)
    told = json.loads((folder / "llama/config.json").read_text())
    told["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.Own"}
    (folder / "llama/config.json").write_text(json.dumps(told | {"architectures": ["Own"]}))
    for name in ("llama", "llama/config.json"):
        with pytest.raises(LoadError, match="pass --trust-remote-code"):
            load(name, on_meta=True)
        assert type(load(name, on_meta=True, layers=1, trust_remote_code=True)).__name__ == "Own"


def test_quantized_weights_are_reported(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "llama/config.json").write_text(
        Path(written(folder, quantization_config=quantized)).read_text()
    )
    assert main(["inspect", "llama", "--layers", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (note,) = (note for note in told["notes"] if "quantized" in note)
    assert note.startswith(
        "the config says that the weights are quantized (fp8), but the plan is for weights in float32: "
    )
    assert note.endswith("dequantize the weights before the conversion")
    (folder / "llama/model.safetensors").write_bytes(b"")
    assert main(["inspect", "llama", "--layers", "1"]) == 0, "it reads no weights"
    for command in ("verify", "tune"):
        assert main([command, "llama"]) == 2
        assert "llama, got quantized ones (fp8); save the dequantized model" in capsys.readouterr().err


@pytest.mark.parametrize("rule", PIPELINE, ids=lambda rule: rule.name)
def test_explain_prints_the_sentences_of_the_code(rule: Rule, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", rule.name]) == 0
    written = capsys.readouterr().out.rstrip("\n")
    told = "\n".join(explanation(rule))
    if not torch.__version__.startswith("2.13"):  # in whose words the page has the examples
        written, told = (text.partition("\nbefore\n")[0] for text in (written, told))
    assert written == told, "run docs/explained.py"


@pytest.mark.parametrize("rule", [rule.name for rule in PIPELINE])
def test_explain(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", rule]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{rule}: ")
    assert "\nSaves " in told
    needs = told.partition("\nneeds\n")[2].partition("\n\n")[0]
    assert ("backend='te'" in needs) == (rule in ("rotary", "wide_linear", "cross_entropy"))
    assert ("other operations may also read norm" in needs) == rule.startswith("layernorm")
    assert (f"- {rule}=True" in needs) == (rule in ("chunked_loss", "pad_vocabulary"))
    assert "- the output of the ... is also read by ..., but the fused module does not return it: " in told
    before, _, after = told.partition("\nbefore\n")[2].partition("\nafter\n")
    assert before != after
    assert f"{'columns' if rule == 'merge_siblings' else rule}(" in after
    if rule == "attention":
        assert "softmax(" in before
        assert "softmax(" not in after
        assert "- the attention adds a learned bias to its scores, " in told
        assert "- the model writes to a tensor in the middle of the attention, but fused " in told
    if rule == "layernorm_mlp":
        assert "Saves the normalized tensor's round trip" in told
        assert "- only one of the two linears has a bias, but LayerNormMLP has two biases or none: " in told


OWN_RULE = """from dataclasses import replace

import torch
from torch import nn
from te_transform.passes.linear import RULE

MINE = replace(RULE, name="mine", example=None)
OTHER = replace(RULE, name="other", example=lambda: (nn.ReLU(), torch.zeros(2)))
exec("def refuse(): yield 'never'", code := {})
NO_FILE = replace(RULE, name="no_file", refuse=code["refuse"], example=None)
NO_MATCH = replace(RULE, name="no_match", example=lambda: (nn.LayerNorm(4), torch.zeros(2, 4)))
"""


def test_explain_a_rule_of_ones_own(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "rules_of_mine.py").write_text(OWN_RULE)
    assert main(["explain", "te_transform.passes.linear:RULE"]) == 0
    told = capsys.readouterr().out
    assert main(["explain", "linear"]) == 0
    assert capsys.readouterr().out == told
    assert main(["explain", "rules_of_mine:MINE"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("mine: Replace each linear that no other rule fused")
    assert "- linear.x, linear.weight, linear.bias, if the model has them" in told
    assert "\nbefore\n" not in told, "there is no example"
    assert main(["explain", "rules_of_mine:NO_FILE"]) == 0
    assert capsys.readouterr().out.startswith("no_file: a rule without a docstring in its file")


RULE_MISTAKES = {
    "x": "expected a rule, one of merge_siblings, rotary,",
    "nowhere:RULE": (
        "expected package.module:factory that can be imported, got 'nowhere:RULE' (ModuleNotFoundError"
    ),
    "math:pi": "expected a te_transform.Rule at 'math:pi', got a float",
    "rules_of_mine:OTHER": (
        "expected an example of the rule 'other' that returns its inputs and a model that is captured as one "
        "graph, got an error (ModelError: expected a model with parameters, got a ReLU without"
    ),
    "rules_of_mine:NO_MATCH": (
        "expected an example that the rule 'no_match' rewrites, got one that stays unchanged (nothing in it"
    ),
}


@pytest.mark.parametrize("name", RULE_MISTAKES)
def test_explain_says_what_is_wrong(name: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "rules_of_mine.py").write_text(OWN_RULE)
    assert main(["explain", name]) == 2
    told, errors = capsys.readouterr()
    assert told == ""
    assert errors.startswith(f"te-transform: {RULE_MISTAKES[name]}")
    assert len(errors.splitlines()) == 1


def test_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["models", "olmo3"]) == 0
    fused = "merge_siblings 4, attention 2, layernorm_linear 1, linear 8"
    assert capsys.readouterr().out.splitlines() == ["olmo3", f"  {fused}", "  not more: norm elsewhere"]
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert "gpt2_eager" in text
    assert max(map(len, text.splitlines())) <= 40
    assert main(["models", "GPT-2 eager"]) == 0
    assert "gpt2_eager" in capsys.readouterr().out
    assert main(["models", "gpt17"]) == 2
    assert capsys.readouterr().err.startswith(
        "te-transform: expected part of a tested model's name, got 'gpt17'"
    )
    assert main(["models", "llamma"]) == 2
    assert capsys.readouterr().err.endswith("did you mean 'llama'?\n")


def test_explain_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        rule.name for rule in PIPELINE
    ]


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no such file": (
        lambda folder: ["nothing"],
        "got 'nothing', which is no file or folder; name one that exists, nothing is downloaded",
    ),
    "no such module": (lambda folder: ["nowhere:two"], "can be imported, got 'nowhere:two' ("),
    "no such factory": (lambda folder: ["models_of_mine:three"], "has no attribute 'three'"),
    "a misspelled factory": (lambda folder: ["models_of_mine:tow"], "; did you mean 'two'?"),
    "no model": (
        lambda folder: ["models_of_mine:number"],
        "expected a torch.nn.Module from 'models_of_mine:number', got int",
    ),
    "no function": (lambda folder: ["math:pi"], "expected a torch.nn.Module from 'math:pi', got float"),
    "a file of Python": (
        lambda folder: ["models_of_mine.py:two"],
        "; name the module as in an import statement",
    ),
    "a factory that fails": (lambda folder: ["models_of_mine:fails"], "RuntimeError: no weights here"),
    "the line of a factory that fails": (
        lambda folder: ["models_of_mine:fails"],
        "without arguments, got an error from 'models_of_mine:fails' (RuntimeError: no weights here) at "
        "models_of_mine.py:51",
    ),
    "the line of a module that fails": (
        lambda folder: [python(folder, "failing", "x = 1\nraise ValueError('no')")],
        "(ValueError: no) at failing.py:2; correct its code",
    ),
    "the line of a mistake in a module": (
        lambda folder: [python(folder, "mistaken", "x = 1\nx = = 2")],
        "expected a module that can be imported, got an error from 'mistaken' (SyntaxError: ",
    ),
    "the line that calls a library": (
        lambda folder: [python(folder, "calling", "import json\n\ndef two():\n    return json.loads('{')")],
        "at calling.py:4",
    ),
    "a factory of arguments": (
        lambda folder: ["models_of_mine:of_width"],
        "expected a factory that can be called without arguments, got an error from ",
    ),
    "a model and its inputs": (
        lambda folder: ["models_of_mine:with_inputs"],
        "got tuple; pass inputs by --input",
    ),
    "more layers than there are": (
        lambda folder: ["llama", "--layers", "13"],
        "expected at most 12 layers, as in the config, got 13",
    ),
    "a class that is no model": (
        lambda folder: [written(folder, architectures=["LlamaConfig"])],
        "expected a model class under architectures in the config, got LlamaConfig",
    ),
    "code for a kind that transformers has": (
        lambda folder: [written(folder, auto_map={"AutoModel": "a.B"})],
        "or pass a config without auto_map: transformers itself supports llama",
    ),
    "an input of four parts": (
        lambda folder: ["models_of_mine:two", "--input", "2x4x16:float32:2:2"],
        "or 2x16:int64:1000 (ids below 1000), got '2x4x16:float32:2:2'; join sizes by x, each at least 1",
    ),
    "sizes with spaces": (
        lambda folder: ["models_of_mine:two", "--input", "2 16"],
        "got '2 16'; join sizes by x",
    ),
    "an input too many": (
        lambda folder: ["models_of_mine:two", "--input", "2x4x16", "--input", "2x4x16"],
        "expected inputs for Sequential.forward(input), got float32[2, 4, 16], float32[2, 4, 16] (too many",
    ),
    "an entry twice": (
        lambda folder: ["llama", "--input", "x.ids=2", "--input", "x=3"],
        "expected one input per name, got several for x",
    ),
    "an empty name": (lambda folder: ["llama", "--input", "=2x4:int64:9"], "expected a name before each ="),
    "a name twice": (
        lambda folder: ["llama", "--input", "x=2", "--input", "x=3"],
        "expected one input per name, got several for x",
    ),
    "sizes twice": (
        lambda folder: ["models_of_mine:two", "--input", "2x4x16", "--batch", "3"],
        "--batch and --length, which are the sizes of generated inputs",
    ),
    "two numbers of a rule": (
        lambda folder: ["llama", "--expect", "linear=1", "--expect", "linear=2"],
        "expected one number per rule for --expect, got linear=1 and linear=2",
    ),
    "a factory's layers": (
        lambda folder: ["models_of_mine:two", "--layers", "1"],
        "expected a config for --layers",
    ),
    "no config": (
        lambda folder: [str(folder)],
        " without a config.json; name a folder as save_pretrained() writes",
    ),
    "no JSON": (
        lambda folder: [str(folder / "models_of_mine.py")],
        "; to pass code, use package.module:factory",
    ),
    "no such kind": (lambda folder: [written(folder, model_type="none")], " can build a model, got "),
    "code": (lambda folder: [written(folder, auto_map={"AutoModel": "a.B"})], "pass --trust-remote-code"),
    "code of no names": (lambda folder: [written(folder, auto_map=5)], "which names Python code (5)"),
    "a shape beyond memory": (
        lambda folder: ["models_of_mine:two", "--input", f"{10**9}x{10**10}"],
        "(RuntimeError: Storage size calculation overflowed",
    ),
    "no number that there is": (
        lambda folder: ["models_of_mine:two", "--input", f"{10**30}x16"],
        "pass a smaller one",
    ),
    "a batch beyond memory": (
        lambda folder: ["llama", "--batch", str(10**18)],
        f"--batch {10**18} and --length 32 (",
    ),
    "no such recipe": (lambda folder: ["llama", "--recipe", "fp7"], "for recipe, got 'fp7'"),
    "no such rule": (lambda folder: ["llama", "--expect", "mlp=2"], ", got 'mlp=2'"),
    "no shape": (
        lambda folder: ["models_of_mine:two", "--input", "2xall"],
        "2x16:int64:1000 (ids below 1000), got '2xall'",
    ),
    "half of the names": (lambda folder: ["llama", "--input", "x=2", "--input", "3"], "name all or none"),
    "no package": (lambda folder: [":two"], "got ':two', which is no file or folder"),
    "a factory that exits": (
        lambda folder: ["models_of_mine:exits"],
        "without arguments, got an error from 'models_of_mine:exits' (SystemExit: 3)",
    ),
    "no object": (lambda folder: [listed(folder)], ", got a list"),
    "no such class": (
        lambda folder: [written(folder, architectures=["Odd"])],
        ", got Odd; name another class",
    ),
    "no size": (
        lambda folder: ["models_of_mine:two", "--input", "0x16"],
        "2x16:int64:1000 (ids below 1000), got '0x16'",
    ),
    "no such input": (
        lambda folder: ["models_of_mine:two", "--input", "2x4x7"],
        "--input 2x16:int64:1000            integers below 1000, such as token ids",
    ),
    "no page": (
        lambda folder: ["models_of_mine:two", "--input", "2x4x16", "--html", "/proc/page.html"],
        "expected a writable file for --html, got /proc/page.html (",
    ),
    "too long": (
        lambda folder: ["llama", "--length", "33"],
        "expected --length of at most 32 (max_position_embeddings), got 33; pass a smaller one",
    ),
    "no Python": (lambda folder: [python(folder, "no_python", "def two(:")], "(SyntaxError: invalid syntax"),
    "a module that exits": (lambda folder: [python(folder, "exiting", "exit(3)")], "(SystemExit: 3)"),
    "a path of a module": (
        lambda folder: ["./models_of_mine:two"],
        "got './models_of_mine:two' (TypeError: ",
    ),
    "a scripted model": (
        lambda folder: ["models_of_mine:scripted"],
        "expected a Python module, got a ScriptModule",
    ),
    "no one number of layers": (
        lambda folder: [
            saved(folder, "ProphetNet", architectures=["ProphetNetForCausalLM"]),
            "--layers",
            "1",
        ],
        "expected a config with one number of layers, got a ProphetNetConfig",
    ),
    "no decimal number": (
        lambda folder: ["llama", "--expect", "linear=\N{SUPERSCRIPT TWO}"],
        "expected RULE=N for --expect",
    ),
    "no number": (lambda folder: ["llama", "--expect", "linear=all"], ", got 'linear=all'"),
    "a forward that exits": (
        lambda folder: ["models_of_mine:Exits", "--input", "2x4x16"],
        "expected a model that runs, got SystemExit: 0 at models_of_mine.py:",
    ),
    "a forward that raises a BaseException": (
        lambda folder: ["models_of_mine:Stops", "--input", "2x4x16"],
        "expected a model that runs, got Stop: enough at models_of_mine.py:",
    ),
    "a factory that raises a BaseException": (
        lambda folder: ["models_of_mine:stops"],
        "expected a model that runs, got Stop: enough at models_of_mine.py:",
    ),
    "an error without a message": (
        lambda folder: ["models_of_mine:Fails", "--input", "2x4x16"],
        "Unreadable: its message cannot be read",
    ),
    "train() that fails": (
        lambda folder: ["models_of_mine:FailsInTrain", "--input", "2x4x16"],
        "expected a model that runs, got Unreadable: its message cannot be read at models_of_mine.py:",
    ),
    "a number beyond int64": (
        lambda folder: ["models_of_mine:two", "--input", f"2x4x16:int64:{2**63}"],
        "expected an input that can be created, got '2x4x16:int64:9223372036854775808' (ValueError",
    ),
    "lazy": (
        lambda folder: ["models_of_mine:lazy", "--input", "2x16"],
        "expected tensors with shapes, got a LazyLinear with lazy ones",
    ),
    "a name of a page that is too long": (
        lambda folder: ["models_of_mine:two", "--input", "2x4x16", "--html", "x" * 300],
        "expected a writable file for --html, got x",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_said_in_a_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = MISTAKES[name]
    assert main(["inspect", *arguments(folder)]) == 2
    told, errors = capsys.readouterr()
    assert told == ""
    assert errors.startswith("te-transform: ")
    assert said in errors
    assert len(errors.splitlines()) == 1 or name in ("no such input", "an error without a message")


def test_the_line_of_a_forward_that_fails_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "from torch import nn\n\ndef two():\n    return Square(4, 4)\n\n"
        "class Square(nn.Linear):\n    def forward(self, x):\n        return x @ x"
    )
    assert main(["inspect", python(folder, "squares", code), "--input=2x4"]) == 2
    assert "\nThe error was raised at squares.py:8.\n" in capsys.readouterr().err


USAGE: list[list[str]] = [
    [],
    ["inspect"],
    ["inspect", "llama", "--batch", "0"],
    ["inspect", "llama", "--html", "nowhere/page.html"],
    ["inspect", "llama", "--html", "."],
    ["explain", "x", "y"],
]


@pytest.mark.parametrize("arguments", USAGE)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: te-transform" in capsys.readouterr().err


def test_a_text_too_many_shows_how_inputs_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", "llama", "--input", "2", "16"])
    told = capsys.readouterr().err
    assert "unrecognized arguments: 16\nOn the command line, pass --input once for each argument" in told


def test_an_input_is_a_dict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = ("--input", "batch.x=2x4x16", "--input", "batch.shift=16")
    assert main(["inspect", "models_of_mine:ReadsDict", *inputs, "--expect", "linear=1"]) == 0
    assert "(batch={x: float32[2, 4, 16], shift: float32[16]})" in capsys.readouterr().out


def test_an_import_that_fails_inside_is_not_called_a_missing_name(folder: Path) -> None:
    (folder / "broken_of_mine.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(LoadError, match="No module named 'nothing_of_this_name'"):
        load("broken_of_mine:two")


MISSPELLED = {
    "an option": (
        ["inspect", "llama", "--recpie", "mxfp8"],
        "unrecognized arguments: --recpie mxfp8",
        "--recipe",
    ),
    "an expected rule": (["inspect", "llama", "--expect", "layernrom_mlp=2"], "=2'", "layernorm_mlp"),
    "an explained rule": (["explain", "layernrom_mlp"], "got 'layernrom_mlp'", "layernorm_mlp"),
}


@pytest.mark.parametrize("name", MISSPELLED)
def test_a_misspelled_name_gets_a_suggestion(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said, correct = MISSPELLED[name]
    with suppress(SystemExit):  # the parser exits by itself
        assert main(arguments) == 2
    assert f"{said}; did you mean {correct!r}?" in capsys.readouterr().err
