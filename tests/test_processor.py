"""The processor: what agent, engine and trainer must agree on."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from reference_pixels import reference_pixels

from megatron_webrl.errors import UserError
from megatron_webrl.processor import Processor, smart_resize


@pytest.fixture(scope="module")
def processor(tiny_model_dir: Path) -> Processor:
    return Processor.load(tiny_model_dir)


def png(width: int, height: int) -> bytes:
    rng = np.random.default_rng(width * 1000 + height)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("size", [(160, 210), (500, 320), (64, 32), (97, 203)])
def test_grid_from_the_size_alone_equals_what_the_image_processor_makes(
    processor: Processor, size: tuple[int, int]
) -> None:
    pixels, grids = reference_pixels(processor.directory, [png(*size)])
    assert tuple(grids[0].tolist()) == processor.grid(*size)
    assert len(pixels) == np.prod(processor.grid(*size))


@pytest.mark.parametrize("size", [(160, 210), (500, 320), (97, 203)])
def test_normalised_patches_are_what_the_image_processor_makes(processor: Processor, size: tuple[int, int]) -> None:
    """Bit by bit, for each of the two equal frames of a still; as bytes they are 8 times smaller."""
    pixels, grids = reference_pixels(processor.directory, [png(*size)])
    patches, grid = processor.patches(png(*size))
    assert list(grid) == grids[0].tolist()
    assert 8 * patches.nbytes == pixels.nbytes
    frames = pixels.view(len(pixels), 3, 2, -1)
    for frame in range(2):
        assert frames[:, :, frame].flatten(1).equal(processor.normalise(patches))


def test_the_demo_screenshot_is_35_tokens(processor: Processor) -> None:
    assert processor.image_tokens(processor.grid(160, 210)) == 35


@settings(deadline=None)
@given(
    st.integers(8, 2000), st.integers(8, 2000), st.sampled_from([28, 32]), st.integers(1, 4), st.integers(64, 16_384)
)
def test_smart_resize_is_that_of_transformers(height: int, width: int, factor: int, low: int, high: int) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as reference

    area = {"factor": factor, "min_pixels": low * factor**2, "max_pixels": high * factor**2}
    try:
        expected = reference(height, width, **area)
    except ValueError:
        with pytest.raises(ValueError, match="too narrow"):
            smart_resize(height, width, **area)
    else:
        assert smart_resize(height, width, **area) == expected


def test_tokens_are_those_of_transformers(processor: Processor, tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(tiny_model_dir))
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Click 42 é  now.<|im_end|>\n"
    assert processor.encode(text) == reference.encode(text, add_special_tokens=False)
    assert processor.tokenizer.get_vocab_size() == len(reference)


@settings(deadline=None, max_examples=30)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40))
def test_decode_inverts_encode(processor: Processor, text: str) -> None:
    ids = processor.encode(text)
    assert processor.decode([*ids, processor.end_token_id]) == text


def test_special_tokens_in_text_are_one_token(processor: Processor) -> None:
    assert processor.encode("<|image_pad|>") == [processor.image_token_id]
    assert processor.encode("<|im_end|>") == [processor.end_token_id]


def test_expand_repeats_each_pad_and_nothing_else(processor: Processor) -> None:
    pad = processor.image_token_id
    grids = [(1, 4, 4), (1, 2, 6)]
    out = processor.expand([5, pad, 6, pad], grids)
    assert out.tolist() == [5] + [pad] * 4 + [6] + [pad] * 3
    with pytest.raises(ValueError, match="1 image_pad tokens for 2 images"):
        processor.expand([pad], grids)


def test_banned_are_all_special_tokens_but_the_end_and_all_padded_rows(processor: Processor) -> None:
    banned = set(processor.banned_ids().tolist())
    assert processor.end_token_id not in banned
    assert processor.image_token_id in banned
    assert set(range(processor.tokenizer.get_vocab_size(), processor.vocab_size)) <= banned
    assert not banned & set(processor.encode("Click the button."))


def test_stop_texts_end_a_reply_and_may_be_sampled(processor: Processor, tiny_model_dir: Path) -> None:
    """Special tokens, which are banned otherwise, and others; after the end token, once each."""
    stop = ["<|endoftext|>", ";", "<|im_end|>", ";"]
    with_stop = Processor.load(tiny_model_dir, stop)
    end, [extra], [plain] = processor.end_token_id, processor.encode("<|endoftext|>"), processor.encode(";")
    assert processor.stop_ids() == [end]
    assert with_stop.stop_ids() == [end, extra, plain]
    assert set(processor.banned_ids()) - set(with_stop.banned_ids()) == {extra}
    words = processor.encode("Click")
    for last in with_stop.stop_ids():
        assert with_stop.decode([*words, last]) == "Click"
        assert with_stop.decode([last, *words]) == processor.decode([last, *words]), "only a final one is removed"
    assert processor.decode([*words, plain]) == "Click;"


@pytest.mark.parametrize(
    ("text", "words"),
    [("\u2603\n\u2603", "tokens of the model"), ("", "0 tokens"), ("<|image_pad|>", "stands for pixels")],
)
def test_a_stop_text_that_is_not_one_token_of_a_reply_is_refused(tiny_model_dir: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=r"sampling\.stop") as caught:
        Processor.load(tiny_model_dir, [text])
    assert repr(text) in str(caught.value) and words in str(caught.value) and "leave it out" in str(caught.value)


def test_missing_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path="):
        Processor.load(tmp_path / "none")
