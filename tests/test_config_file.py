"""A config reaches neither the hub, nor imports, nor kernels, unless its code is trusted."""

import json
import pickle
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import dynamic_module_utils
from transformers.integrations import hub_kernels

from te_transform.command_line.main import main
from te_transform.config_file import read_config
from te_transform.load import LoadError, load

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {"model_type": "llama", **SIZES},
    "vision_config": {
        "model_type": "clip_vision_model",
        **SIZES,
        "image_size": 8,
        "patch_size": 4,
        "projection_dim": 32,
    },
}
DETR = {"architectures": ["DetrModel"], "model_type": "detr", "d_model": 32}


@pytest.fixture(autouse=True)
def reached(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fail if anything is asked of the hub, of the network or of files of code."""
    calls: list[Any] = []

    def recorded(name: str) -> Callable[..., Any]:
        def call(*args: Any, **_: Any) -> Any:
            calls.append((name, args))
            raise RuntimeError(f"{name} was called")

        return call

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *_: True)
    for home, name in (
        (hub_kernels, "get_kernel"),
        (dynamic_module_utils, "get_class_in_module"),
        (socket, "getaddrinfo"),
        (socket.socket, "connect"),
    ):
        monkeypatch.setattr(home, name, recorded(name))
    yield
    assert calls == []


def folder(tmp_path: Path, config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def inside(config: dict[str, Any], **entries: Any) -> dict[str, Any]:
    """A config of images and text with more entries in the config of its text."""
    return config | {"text_config": config["text_config"] | entries}


KERNEL = "expected one of eager, sdpa, flex_attention for {}"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a kernel": (
        LLAMA | {"attn_implementation": "kernels-community/x"},
        KERNEL.format("attn_implementation"),
    ),
    "a kernel of flash attention": (
        LLAMA | {"_attn_implementation": "flash_attention_2"},
        KERNEL.format("_attn_implementation"),
    ),
    "a kernel behind a bar": (LLAMA | {"attn_implementation": "paged|a/b"}, "got 'paged|a/b'; change it"),
    "a kernel of a part": (
        inside(LLAVA, attn_implementation="kernels-community/x:f"),
        KERNEL.format("text_config.attn_implementation"),
    ),
    "kernels by part": (
        LLAVA | {"attn_implementation": {"": "sdpa", "vision_config": "a/b@main"}},
        "got 'a/b@main'",
    ),
    "experts": (
        LLAMA | {"experts_implementation": "sonicmoe"},
        "expected one of eager, batched_mm, grouped_mm for experts_implementation",
    ),
    "a kernel in a list": (
        LLAMA | {"rope_scaling": [[{"attn_implementation": "flash_attention_2"}]]},
        KERNEL.format("rope_scaling.0.0.attn_implementation"),
    ),
    "a kernel of a layer": (
        LLAMA | {"per_layer_config": {"0": {"attn_implementation": "a/b"}}},
        KERNEL.format("per_layer_config.0.attn_implementation"),
    ),
    "code of a part": (
        inside(LLAVA, auto_map={"AutoModel": "other/repository--code.Class"}),
        "which names Python code (AutoModel); pass --trust-remote-code",
    ),
    "a function as a dtype": (LLAMA | {"torch_dtype": "compile"}, "expected the name of a torch.dtype"),
    "a path as a dtype": (LLAMA | {"dtype": "os.system"}, "for dtype in"),
    "a dtype of a part": (inside(LLAVA, dtype="load"), "for text_config.dtype in"),
    "a backbone of the hub": (
        DETR | {"backbone": "microsoft/resnet-50", "use_pretrained_backbone": True},
        "expected a backbone_config in its place for backbone",
    ),
    "a backbone of timm": (
        DETR | {"backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:a/b"}},
        "for backbone_config.backbone",
    ),
    "an architecture of the hub": (
        {"model_type": "timm_wrapper", "architecture": "hf-hub:a/b", "num_labels": 2},
        "expected a name without path or repository for architecture",
    ),
    "a file for timm": (
        {"architecture": "resnet18", "pretrained_cfg": {}, "model_args": {"checkpoint_path": "weights.pth"}},
        "expected numbers alone for model_args",
    ),
    "a path of a class": (LLAMA | {"architectures": ["a/b"]}, "without path or repository for architectures"),
    "a class of a module": (LLAMA | {"architectures": ["os"]}, ", got os; name another class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_that_may_name_code_are_refused(name: str, tmp_path: Path) -> None:
    config, sentence = REFUSED[name]
    with pytest.raises(LoadError, match=re.escape(sentence)):
        load(folder(tmp_path, config), on_meta=True)


def test_a_default_that_is_looked_up_at_the_hub_is_not(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="OfflineModeIsEnabled"):
        load(folder(tmp_path, DETR | {"use_timm_backbone": False}), on_meta=True)


UNREAD: dict[str, dict[str, Any]] = {
    "custom_pipelines": {"custom_pipelines": {"own": {"impl": "code.Pipeline", "pt": ["AutoModel"]}}},
    "kernel_config": {"kernel_config": {"RMSNorm": "kernels-community/x:RMSNorm"}, "use_kernels": True},
    "kernels": {"kernels": ["kernels-community/x"]},
    "transformers_weights": {"transformers_weights": "../other.bin"},
    "configuration_files": {"configuration_files": ["config.9.0.0.json"]},
    "base_model_name_or_path": {"base_model_name_or_path": "someone/base", "_name_or_path": "someone/base"},
    "tokenizer_class": {"tokenizer_class": "code.Tokenizer"},
    "fusion_config": {"fusion_config": {"patch_embeddings": True}},
}


@pytest.mark.parametrize("name", UNREAD)
def test_unknown_keys_of_a_config_are_not_read(name: str, tmp_path: Path) -> None:
    where = folder(tmp_path, LLAMA | UNREAD[name])
    model = load(where, on_meta=True)
    assert not hasattr(model.config, name)
    assert model.config.name_or_path == where
    (note,) = read_config(tmp_path / "config.json").notes()
    assert note == (
        f"config.json has entries that were skipped, because they could name code or files ({name}): pass "
        "--trust-remote-code to read them"
    )


READ: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Any]] = {
    "an implementation": (
        LLAMA | {"attn_implementation": "eager"},
        lambda c: c._attn_implementation,
        "eager",
    ),
    "one by part": (
        LLAVA | {"attn_implementation": {"": "sdpa", "text_config": "eager"}},
        lambda c: c.text_config._attn_implementation,
        "eager",
    ),
    "a dtype": (LLAMA | {"torch_dtype": "bfloat16"}, lambda c: c.dtype, torch.bfloat16),
    "scaled positions": (
        LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0},
        lambda c: (c.rope_parameters["rope_type"], c.rope_parameters["rope_theta"]),
        ("linear", 500.0),
    ),
    "positions of a kind without a field for them": (
        SIZES | {"model_type": "cohere2_moe", "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
        lambda c: c.rope_parameters["rope_theta"],
        9.0,
    ),
    "a number of no field": (LLAMA | {"head_size": 16}, lambda c: c.head_size, 16),
    "names of classes": (LLAMA | {"id2label": {"0": "a/b", "1": "c:d"}}, lambda c: c.id2label[0], "a/b"),
    "what a class asks for by name": (
        {"model_type": "nemotron_h", **SIZES, "hybrid_override_pattern": "M*", "num_hidden_layers": 2},
        lambda c: len(c.layers_block_type),
        2,
    ),
    "an infinite number": (
        LLAMA | {"rms_norm_eps": {"__float__": "Infinity"}},
        lambda c: c.rms_norm_eps,
        float("inf"),
    ),
    "another class for layers of several kinds": (
        LLAMA
        | {
            "head_dim": 16,
            "model_type": "mistral",
            "layer_types": ["full_attention"],
            "architectures": ["MinistralModel"],
        },
        lambda c: c.model_type,
        "ministral",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_keys_that_name_no_code_are_read(name: str, tmp_path: Path) -> None:
    config, of, expected = READ[name]
    where = folder(tmp_path, config)
    if name == "what a class asks for by name":
        told = read_config(tmp_path / "config.json")
        assert of(transformers.CONFIG_MAPPING["nemotron_h"].from_dict(told.entries)) == expected
    else:
        assert of(load(where, on_meta=True).config) == expected
    assert list(read_config(tmp_path / "config.json").notes()) == []


def test_files_beside_a_config_are_not_read(tmp_path: Path) -> None:
    where = folder(tmp_path, LLAMA)
    load(where).save_pretrained(where)
    code = {"AutoTokenizer": ["code.Tokenizer", None], "AutoProcessor": "code.Processor"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Tokenizer", "auto_map": code})
    )
    (tmp_path / "tokenizer.json").write_text("no JSON")
    (tmp_path / "generation_config.json").write_text(json.dumps({"custom_generate": "someone/code"}))
    (tmp_path / "custom_generate").mkdir()
    for file in ("code.py", "modeling_llama.py", "custom_generate/generate.py"):
        (tmp_path / file).write_text("raise SystemExit('imported')")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    model = load(where)
    assert not next(model.parameters()).is_meta
    assert (model.config.name_or_path, model.name_or_path) == (where, where)


def test_an_adapter_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = folder(tmp_path, LLAMA)
    adapter = {"base_model_name_or_path": "someone/base", "peft_type": "LORA", "auto_mapping": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert main(["verify", where]) == 2
    assert f"expected the weights of a whole model in {where}, got an adapter" in capsys.readouterr().err
    assert next(load(where, on_meta=True).parameters()).is_meta


def test_entries_that_are_not_read_are_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = folder(
        tmp_path,
        LLAMA | {"quantization_config": {"quant_method": "x/y", "modules": ["a"]}} | UNREAD["kernels"],
    )
    assert main(["inspect", where, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("were skipped, because they could name code or files (kernels)" in note for note in notes)
    assert any("the weights are quantized (x/y)" in note for note in notes)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a":' + "[" * 900 + "]" * 900 + "}"])
def test_a_config_of_endless_depth_is_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config\.json, got JSON that is nested too deeply; pass another"):
        load(str(tmp_path), on_meta=True)


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    where = folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(LoadError, match=rf"expected a config and weights .* got {where} \(SafetensorError"):
        load(where)
