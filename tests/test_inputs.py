"""Inputs that are invented: what they are, which are tried, and what an error says of them."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import te_transform
from te_transform import InputError, TraceError
from te_transform.graph.inputs import Inputs, as_inputs, invent
from tests.families import FAMILIES
from tests.others import OTHERS
from tests.zoo import CASES, EXTRA, Case

MODELS = CASES | EXTRA | FAMILIES | OTHERS


class Reads(nn.Module):
    """A linear that is made first, an embedding, and a forward that says which of them reads its argument."""

    def __init__(self, takes: str):
        super().__init__()
        self.head, self.embedding, self.takes = nn.Linear(8, 5), nn.Embedding(5, 8), takes

    def forward(self, x: Tensor) -> Tensor:
        if self.takes == "ids":
            return self.head(self.embedding(x))
        if self.takes == "floats":
            return self.head(x) + self.embedding.weight.sum()
        raise ValueError("neither, thank you\nreally")


@pytest.mark.parametrize(("takes", "shape"), [("floats", (2, 8, 8)), ("ids", (2, 8))])
def test_token_ids_are_tried_where_floats_fail(takes: str, shape: tuple[int, ...]) -> None:
    model = Reads(takes)
    (inputs,) = as_inputs(model, None)
    (given,) = inputs.args
    assert given.shape == shape
    assert given.is_floating_point() is (takes == "floats")
    assert inputs.invented
    converted = te_transform.convert(model)
    assert te_transform.verify(model, converted)


def test_models_with_dummy_inputs_need_no_transformers() -> None:
    model = Reads("ids")
    model.dummy_inputs = {}
    assert te_transform.inspect(model).counts["linear"] == 1


class Wrapper(nn.Module):
    """A wrapper as DDP: it passes all arguments to the module inside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


def test_a_wrapper_takes_what_the_model_inside_takes() -> None:
    model = CASES["llama"].build(num_hidden_layers=1)
    (inputs,), (own,) = as_inputs(Wrapper(Wrapper(model)), None), as_inputs(model, None)
    assert inputs.kwargs["input_ids"].shape == own.kwargs["input_ids"].shape
    te_transform.profile(Wrapper(model), plan=False)


def test_an_error_says_how_many_guesses_failed_and_what_the_first_raised() -> None:
    with pytest.raises(InputError) as raised:
        te_transform.convert(Reads("nothing"))
    assert str(raised.value) == (
        "expected example inputs, got none, and Reads failed on all 7 guesses for forward(x): on "
        "float32[2, 8, 8] it raised ValueError: neither, thank you; "
        "pass example_inputs=(tensor, ...) or example_inputs={'name': tensor, ...}"
    )


def test_an_error_about_a_printed_module_has_its_end() -> None:
    class Unpacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8))

        def forward(self, features: dict[str, Tensor]) -> Tensor:
            return self.inner(**features)

    with pytest.raises(InputError, match=r"Sequential\(\.\.\.\) argument after \*\* must be a mapping"):
        te_transform.inspect(Unpacks())


class Patches(nn.Module):
    """Reads an image of one size, and says so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(48, 8), nn.Parameter(torch.randn(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.linear(patches) + self.positions


def test_images_of_several_sizes_are_tried() -> None:
    (inputs,) = as_inputs(Patches(), None)
    assert inputs.args[0].shape == (2, 3, 32, 32)
    assert inputs.invented


class Squares(nn.Module):
    """Takes what no linear says: as many rows as columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == x.shape[-2], "squares, please"
        return self.linear(self.norm(x))


def test_an_error_on_invented_inputs_says_that_they_were() -> None:
    model = CASES["llama"].build()
    model.forward = lambda input_ids, use_cache=False: Squares()(input_ids)
    with pytest.raises(TraceError) as raised:
        te_transform.convert(model)
    assert str(raised.value).startswith(
        "expected example inputs, got none, and LlamaForCausalLM failed on the generated inputs "
        "(input_ids=int64[2, 8], use_cache=False): AssertionError: squares, please"
    )
    assert "pass example_inputs=(tensor, ...)" in str(raised.value)
    with pytest.raises(TraceError, match=r"^Squares failed on the example inputs \(float32\[2, 8, 7\]\)"):
        te_transform.convert(Squares(), torch.randn(2, 8, 7))


class Several(nn.Linear):
    """Takes two arguments of the same kind."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + y)


@pytest.mark.parametrize("door", [te_transform.convert, te_transform.inspect, te_transform.profile])
def test_an_empty_batch_is_refused(door: Callable[[nn.Module, Tensor], object]) -> None:
    with pytest.raises(
        InputError, match=r"with values, got float32\[0, 4\]; pass a batch of at least one row"
    ):
        door(nn.Linear(4, 4), torch.zeros(0, 4))


def test_a_converted_model_takes_an_empty_batch() -> None:
    converted = te_transform.convert(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(2, 4))
    assert converted(torch.zeros(0, 4)).shape == (0, 4)


def test_two_arguments_of_one_kind_are_invented() -> None:
    (inputs,) = as_inputs(Several(4, 4), None)
    assert [tensor.shape for tensor in inputs.args] == [(2, 8, 4), (2, 8, 4)]


class Masked(nn.Module):
    """Embeds ids, and branches on the values of their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if attention_mask.shape[1] > 6 or not attention_mask.bool().all():
            raise ValueError("too long")
        return self.linear(self.embedding(input_ids) * attention_mask[..., None])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_inputs_of_a_model_that_reads_values_are_generated_for_meta_too(device: str) -> None:
    inputs = invent(Masked().to(device), length=12)
    assert str(inputs) == "int64[2, 6], int64[2, 6]"
    assert device == "meta" or inputs.args[1].unique().tolist() == [1]


class Sentences(nn.Module):
    """Embeds sentences as an encoder of sentence-transformers does: of a dict, by a model inside."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 20}
        self.model = BertModel(BertConfig(num_hidden_layers=1, **sizes))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features.get("attention_mask").unsqueeze(-1)
        words = self.model(features["input_ids"], features["attention_mask"]).last_hidden_state
        return features | {"sentence_embedding": (words * mask).sum(1) / mask.sum(1)}


def test_a_dict_of_what_the_model_inside_reads_is_generated() -> None:
    model = Sentences()
    inputs = invent(model, length=12)
    assert str(inputs) == "{input_ids: int64[2, 12], attention_mask: int64[2, 12]}"
    assert te_transform.inspect(model).counts["attention"] == 1


def test_many_arguments_are_asked_for() -> None:
    class Four(nn.Linear):
        def forward(self, x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
            return super().forward(x + y + z + w)

    with pytest.raises(InputError, match=r"none can be generated for Four.forward\(x, y, z, w\); pass"):
        as_inputs(Four(4, 4), None)


class Denoiser(nn.Module):
    """Patches of latents, a time, and a class or a text, whose sizes a config says."""

    def __init__(self, **config: object):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.patches, self.time = nn.Conv2d(4, 8, 2, 2), nn.Linear(1, 8)
        self.label, self.text, self.pooled = nn.Embedding(3, 8), nn.Linear(6, 8), nn.Linear(5, 8)

    def condition(self, x: Tensor, t: Tensor, *more: Tensor) -> Tensor:
        assert x.shape[2:] == (16, 16)  # as positions of a table are
        return self.patches(x).flatten(2).mT + (self.time(t[:, None]) + sum(more))[:, None]


class OfClasses(Denoiser):
    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.condition(x, t, self.label(y))


class OfVideos(Denoiser):
    """Takes the frames before the channels."""

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
    ) -> Tensor:
        frames = hidden_states.shape[1]
        text = self.text(encoder_hidden_states * encoder_attention_mask[..., None]).mean(1)
        conditions = (timestep.repeat(frames), text.repeat(frames, 1))
        return self.condition(hidden_states.transpose(0, 1).flatten(0, 1), *conditions)


class OfRows(nn.Linear):
    """Takes patches of latents as rows, and their grid."""

    config = SimpleNamespace(in_channels=4)

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, img_shapes: list[list[tuple[int, ...]]]
    ) -> Tensor:
        assert [math.prod(shape) for (shape,) in img_shapes] == [hidden_states.shape[1]] * len(hidden_states)
        return super().forward(hidden_states) * timestep[:, None, None]


class OfLists(Denoiser):
    """Takes a list of latents and a list of texts."""

    def forward(self, x: list[Tensor], t: Tensor, cap_feats: list[Tensor]) -> Tensor:
        return self.condition(torch.stack(x), t, self.text(torch.stack(cap_feats)).mean(1))


class OfTexts(Denoiser):
    def forward(
        self, sample: Tensor, encoder_hidden_states: Tensor, pooled_projections: Tensor, timestep: Tensor
    ) -> Tensor:
        text = self.text(encoder_hidden_states).mean(1)
        return self.condition(sample, timestep, text, self.pooled(pooled_projections))


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (OfClasses(), {"x": (2, 4, 16, 16), "t": (2,), "y": (2,)}),
        (
            OfTexts(sample_size=16),
            {
                "sample": (2, 4, 16, 16),
                "timestep": (2,),
                "encoder_hidden_states": (2, 8, 6),
                "pooled_projections": (2, 5),
            },
        ),
    ],
    ids=["classes", "texts"],
)
def test_latents_times_and_conditions_are_generated(
    model: nn.Module, shapes: dict[str, tuple[int, ...]]
) -> None:
    (inputs,) = as_inputs(model, None)
    assert {name: tensor.shape for name, tensor in inputs.kwargs.items()} == shapes
    assert te_transform.inspect(model).counts["linear"] >= 1


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            OfVideos(sample_size=16, in_channels=4, video_length=5, text_dim=6),
            "hidden_states=float32[2, 5, 4, 16, 16], timestep=float32[2], "
            "encoder_hidden_states=float32[2, 8, 6], encoder_attention_mask=int64[2, 8]",
        ),
        (
            OfRows(4, 8),
            "hidden_states=float32[2, 8, 4], timestep=float32[2], img_shapes=[[(1, 2, 4)], [(1, 2, 4)]]",
        ),
        (
            OfLists(sample_size=16, cap_feat_dim=6),
            "x=[float32[4, 16, 16], float32[4, 16, 16]], t=float32[2], "
            "cap_feats=[float32[8, 6], float32[8, 6]]",
        ),
    ],
    ids=["videos", "rows", "lists"],
)
def test_videos_rows_and_lists_of_latents_are_generated(model: nn.Module, text: str) -> None:
    assert str(as_inputs(model, None)[0]) == text


class OfSounds(nn.Module):
    """Latents of a sound, and two texts whose names and widths no config says."""

    config = SimpleNamespace(in_channels=4)

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.time = nn.Conv1d(4, 8, 1), nn.Linear(1, 8)
        self.words, self.melody = nn.Linear(5, 8), nn.Linear(9, 8)

    def forward(
        self, x: Tensor, t: Tensor, words: Tensor, word_lens: Tensor, melody: Tensor | None = None
    ) -> Tensor:
        known = torch.arange(words.shape[1])[None] < word_lens[:, None]
        texts = torch.cat([self.words(words) * known[..., None], self.melody(melody)], 1)
        return self.latents(x).mT + (texts.mean(1) + self.time(t[:, None]))[:, None]


class OfTextTables(Denoiser):
    """Takes texts of fixed lengths with their masks, a pooled text, and a scale that it does not need."""

    def __init__(self) -> None:
        super().__init__(sample_size=16)
        self.positions, self.padding = nn.Parameter(torch.ones(7, 8)), nn.Parameter(torch.zeros(12, 8))

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor | None = None,
        text_mask: Tensor | None = None,
        encoder_hidden_states_2: Tensor | None = None,
        text_mask_2: Tensor | None = None,
        scale: Tensor | None = None,
        pooled: Tensor | None = None,
        layers: Tensor | None = None,
    ) -> Tensor:
        if scale is not None:
            hidden_states = hidden_states * scale.sum() * 2
        second = self.text(encoder_hidden_states_2) + self.positions
        texts = torch.cat([encoder_hidden_states, second], 1)
        mask = torch.cat([text_mask, text_mask_2], 1)
        texts = torch.where(mask[..., None] > 0, texts, self.padding)
        return self.condition(
            hidden_states, timestep, texts.mean(1), self.pooled(pooled) + self.text(layers[9]).mean(1)
        )


class OfPatches(nn.Module):
    """Takes frames with the channels last, as patches of 2 x 2 pixels, and a mask of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time, self.text = nn.Linear(12, 8), nn.Linear(1, 8), nn.Linear(5, 8)

    def forward(
        self, hidden_states: Tensor, timestep_ratio: Tensor, encoder_hidden_states: Tensor, text_mask: Tensor
    ) -> Tensor:
        batch, frames, height, width, channels = hidden_states.shape
        patches = hidden_states.view(batch, frames, height // 2, 2, width // 2, 2, channels).transpose(3, 4)
        text = self.text(torch.where(text_mask[..., None], encoder_hidden_states, 0)).mean(1)
        known = text + self.time(timestep_ratio[:, None])
        return self.patches(patches.flatten(4)).flatten(1, 3) + known[:, None]


class OfTwoLatents(Denoiser):
    """Takes latents to denoise and latents of an image; its angles are computed in the first call only."""

    def __init__(self) -> None:
        super().__init__(sample_size=16)
        self.angles: Tensor | None = None

    def forward(self, sample: Tensor, timestep: Tensor, image_latents: Tensor) -> Tensor:
        if self.angles is None:
            self.angles = torch.ones(8).cos().sin().cos().sin()
        return self.condition(sample, timestep) + self.patches(image_latents).flatten(2).mT * self.angles


class OfLayers(Denoiser):
    """Takes several rows for each token, a list of texts, and a condition in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(7, 8) for _ in range(3))
        self.tokens, self.pixels = nn.Linear(9, 1), nn.Conv2d(3, 8, 16, 16)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        layers: list,
        image_cond: Tensor,
    ) -> Tensor:
        batch, tokens, _, width = encoder_hidden_states.shape
        text = self.text(self.tokens(encoder_hidden_states.mT).view(batch, tokens, width)).mean(1)
        for index, layer in enumerate(layers):
            text = text + self.projections[index](layer).mean(1)
        x = self.condition(sample, timestep, text)
        return torch.cat([x, self.pixels(image_cond).flatten(2).mT], -1)


class OfPackedPatches(nn.Module):
    """Takes each patch of the latents with its channels and pixels, and the grid of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv3d(4, 8, (1, 2, 2), (1, 2, 2)), nn.Linear(1, 8)

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, shape_list: list[list[tuple[int, ...]]] | None = None
    ) -> Tensor:
        batch, patches, _, _, _, _ = hidden_states.shape
        rows = self.patches(hidden_states.flatten(0, 1)).view(batch, patches, -1)
        assert shape_list is not None, "shape_list is None"
        assert [math.prod(shape) for (shape,) in shape_list] == [patches] * batch
        return rows + self.time(timestep[:, None])[:, None]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            OfLayers,
            "sample=float32[2, 4, 16, 16], timestep=float32[2], encoder_hidden_states=float32[2, 8, 9, 6], "
            "layers=[float32[2, 8, 7], float32[2, 8, 7], float32[2, 8, 7]], "
            "image_cond=float32[2, 3, 128, 128]",
        ),
        (
            OfPackedPatches,
            "hidden_states=float32[2, 8, 4, 1, 2, 2], timestep=float32[2], "
            "shape_list=[[(1, 2, 4)], [(1, 2, 4)]]",
        ),
        (
            OfPatches,
            "hidden_states=float32[2, 4, 8, 8, 3], timestep_ratio=float32[2], "
            "encoder_hidden_states=float32[2, 8, 5], text_mask=bool[2, 8]",
        ),
        (
            OfTwoLatents,
            "sample=float32[2, 4, 16, 16], timestep=float32[2], image_latents=float32[2, 4, 16, 16]",
        ),
        (
            OfSounds,
            "x=float32[2, 4, 8], t=float32[2], words=float32[2, 8, 5], word_lens=int64[2], "
            "melody=float32[2, 8, 9]",
        ),
        (
            OfTextTables,
            "hidden_states=float32[2, 4, 16, 16], timestep=float32[2], "
            "encoder_hidden_states=float32[2, 5, 8], text_mask=int64[2, 5], "
            "encoder_hidden_states_2=float32[2, 7, 6], text_mask_2=int64[2, 7], "
            "pooled=float32[2, 5], layers=float32[64, 2, 8, 6]",
        ),
    ],
)
def test_sizes_and_forms_that_no_name_says_are_found_by_running(
    kind: type[nn.Module], text: str, device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with torch.device(device):
        model = kind()
    (inputs,) = as_inputs(model, None)
    assert str(inputs) == text
    assert not capfd.readouterr().err  # no tracebacks of operations on fake tensors
    if device == "cpu":
        model(**inputs.kwargs)


@pytest.mark.parametrize("name", ["nanogpt_flash", "llama", "vit", "t5", "torch_mha_bare"])
def test_the_models_run_on_what_is_invented_for_them(name: str) -> None:
    model = CASES[name].build()
    (inputs,) = as_inputs(model, None)
    model(*inputs.args, **inputs.kwargs)


def test_images_have_three_channels_where_a_config_does_not_say() -> None:
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PreTrainedConfig):
        image_size = 8

    class Model(transformers.PreTrainedModel):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__(Config())
            self.convolution = nn.Conv2d(3, 4, 4)

    (inputs,) = as_inputs(Model(), None)
    assert inputs.kwargs["pixel_values"].shape == (2, 3, 8, 8)


def test_generated_inputs_are_reproducible_and_keep_the_random_state() -> None:
    model, before = Reads("ids"), torch.get_rng_state()
    first, again = as_inputs(model, None)[0], as_inputs(model, None)[0]
    assert torch.equal(first.args[0], again.args[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_clone_shares_what_was_one_and_nothing_with_the_original() -> None:
    x = torch.ones(2)
    args, kwargs = Inputs((x, [x]), {"y": x, "cache": {}}).clone()
    assert args[0] is args[1][0] is kwargs["y"]
    args[0].zero_()
    kwargs["cache"]["k"] = 1
    assert torch.equal(x, torch.ones(2))


@pytest.mark.integration
def test_inputs_are_invented_for_most_models() -> None:
    """Not for those with many arguments, or of shapes that nothing in them tells."""
    failed = [name for name, case in MODELS.items() if not invents(case)]
    assert len(failed) <= 0.1 * len(MODELS), failed


def invents(case: Case) -> bool:
    model = case.build()
    try:
        (inputs,) = as_inputs(model, None)
        model(*inputs.args, **inputs.kwargs)
    except Exception:
        return False
    return inputs.invented
