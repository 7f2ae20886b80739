import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.engine.tokenizer import SPECIAL_TOKENS, StreamDecoder, Tokenizer
from turngate.runtime.errors import ConfigError

CORPUS = [
    'search["red hiking backpack"]',
    "Price: $69. Rating: 4.5. Colors: red, blue.\n1. item_3",
    "a red backpack under $80 rated at least 4 stars",
]
TOKENIZER = Tokenizer.train(CORPUS)
# Texts made of what the rules look at: known and unknown words, digits, identifiers, spaces, separators.
SHOPPING = st.lists(
    st.sampled_from(
        ["red", "Red", "hiking", "item_3", "item_42", "_", "4", "69", " ", "  ", "\n", ": $", '["', ".", "é", "٣", "²"]
    )
).map("".join)


def tokens_of(text: str) -> list[bytes]:
    return [TOKENIZER.bytes_of(token) for token in TOKENIZER.encode(text)]


@given(st.one_of(SHOPPING, st.text(st.characters(codec="utf-8"))))
def test_decoding_what_was_encoded_gives_the_text_back(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.count(text) == len(ids)
    assert not any(TOKENIZER.is_special(token) for token in ids)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30), st.booleans())
def test_streamed_text_concatenates_to_the_decoded_text_for_any_ids(ids, skip_special):
    decoder = StreamDecoder(TOKENIZER, skip_special=skip_special)
    streamed = "".join(map(decoder.push, ids)) + decoder.finish()
    assert streamed == TOKENIZER.decode(ids, skip_special=skip_special)
    assert b"".join(TOKENIZER.decode_pieces(ids, skip_special=skip_special)).decode("utf-8", "replace") == streamed


def test_a_word_is_one_token_alone_after_a_space_and_in_quotes():
    (red,) = TOKENIZER.encode("red")
    assert red in TOKENIZER.encode("hiking red")
    assert red in TOKENIZER.encode('"red"')


def test_shopping_text_takes_few_tokens():
    assert tokens_of('search["red hiking backpack"]') == [b"search", b'["', b"red", b"hiking", b"backpack", b'"]']
    assert tokens_of("Price: $69. Rating: 4.5.") == [
        b"Price", b": $", b"6", b"9", b". ", b"Rating", b": ", b"4", b".", b"5", b".",
    ]  # fmt: skip
    assert tokens_of("item_3") == [b"item_3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("red red", [b"red", b"red"]),
        ("4 stars", [b"4", b"stars"]),
        ("least 4", [b"least", b"4"]),
        ("69", [b"6", b"9"]),
        ("6 9", [b"6", b" ", b"9"]),
        ("4stars", [b"4", b"", b"stars"]),
        ("red  red", [b"red", b" ", b" ", b"red"]),
        (" red ", [b" ", b"red", b" "]),
        ("item_42", [b"i", b"t", b"e", b"m", b"_", b"4", b"2"]),
        ("", []),
        ("\0", [b"\0"]),
    ],
)
def test_spaces_are_implied_between_words_and_explicit_elsewhere(text, expected):
    assert tokens_of(text) == expected


def test_unknown_words_become_bytes():
    assert tokens_of("zé") == [b"z", b"\xc3", b"\xa9"]


def test_names_of_special_tokens_in_user_text_stay_plain_text():
    ids = TOKENIZER.encode("<|user|>")
    assert TOKENIZER.special("<|user|>") not in ids
    assert TOKENIZER.decode(ids) == "<|user|>"


def test_special_tokens_are_left_out_of_the_text_or_written_by_name():
    ids = [*TOKENIZER.encode("red"), TOKENIZER.end, *TOKENIZER.encode("red")]
    assert TOKENIZER.decode(ids) == "redred"
    assert TOKENIZER.decode(ids, skip_special=False) == "red<|end|>red"


def test_a_lone_surrogate_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"valid Unicode: got a lone surrogate '\\ud800' at index 2"):
        TOKENIZER.encode("ab\ud800")


@pytest.mark.parametrize("token", [-1, len(TOKENIZER)])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ConfigError, match="token ids must lie in"):
        TOKENIZER.decode([token])
    with pytest.raises(ConfigError, match="token ids must lie in"):
        TOKENIZER.bytes_of(token)


def test_bytes_that_are_not_utf8_decode_to_the_replacement_character():
    assert TOKENIZER.decode([0xC3, 0x28]) == "\ufffd("


def test_training_keeps_the_most_useful_pieces_within_the_bound():
    bare = len(Tokenizer([]))
    tokenizer = Tokenizer.train(["backpack backpack red, red, a"], max_vocab=bare + 2)
    assert tokenizer.pieces == ("backpack", "red")
    assert Tokenizer.train(["red blue blue"], min_count=2).pieces == ("blue",)
    with pytest.raises(ConfigError, match="max_vocab must be at least"):
        Tokenizer.train([], max_vocab=bare - 1)


def test_training_does_not_depend_on_the_order_of_texts():
    assert Tokenizer.train(CORPUS) == Tokenizer.train(CORPUS[::-1])


def test_saved_vocabulary_loads_to_the_same_ids(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path)
    assert loaded == TOKENIZER
    assert [loaded.encode(text) for text in CORPUS] == [TOKENIZER.encode(text) for text in CORPUS]


def test_a_pickled_tokenizer_is_equal():
    assert pickle.loads(pickle.dumps(TOKENIZER)) == TOKENIZER


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "readable tokenizer.json"),
        (b'{"format":"turngate-tokenizer-1","special":[],"pieces":[]}', "special tokens must be"),
        (
            msgspec.json.encode({"format": "turngate-tokenizer-1", "special": SPECIAL_TOKENS, "pieces": ["a b"]}),
            "words or",
        ),
        (
            msgspec.json.encode({"format": "turngate-tokenizer-1", "special": SPECIAL_TOKENS, "pieces": ["a", "a"]}),
            "twice",
        ),
    ],
)
def test_a_broken_vocabulary_file_is_refused(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_missing_vocabulary_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"readable tokenizer\.json"):
        Tokenizer.load(tmp_path / "none.json")
