"""tokens: each text that two tokenizers make other tokens of is put down to what makes it so."""

import gzip
import json
import shutil

import pytest

import divergence
from divergence.errors import PromptError, UsageError

TEXTS = ["The bridge was built in 1890, and it didn't fall.", "one two three four", "ÄÖ  x "]


@pytest.fixture(scope="module")
def original(llama, tmp_path_factory):
    """A folder with a tokenizer alone."""
    folder = tmp_path_factory.mktemp("tokens") / "a"
    folder.mkdir()
    for file in llama.glob("*"):
        if "token" in file.name or "chat" in file.name:
            shutil.copy(file, folder)
    return folder


@pytest.fixture
def changed(original, tmp_path):
    """``changed(change)``: the tokenizer with its tokenizer.json changed."""

    def copy(change, settings=None):
        folder = tmp_path / "b"
        shutil.copytree(original, folder)
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        if settings is not None:
            settings(folder)
        return folder

    return copy


def no_bos(content):
    content["post_processor"]["single"] = content["post_processor"]["single"][1:]


def two_bos(content):
    content["post_processor"]["single"].insert(0, content["post_processor"]["single"][0])


def with_eos(content):
    content["post_processor"]["single"].append({"SpecialToken": {"id": "<|eos|>", "type_id": 0}})


def lower_case(content):
    content["normalizer"] = {"type": "Lowercase"}


def no_split(content):
    content["pre_tokenizer"]["use_regex"] = False


def fewer_merges(content):
    merges = content["model"]["merges"]
    content["model"]["merges"] = merges[: len(merges) // 2]


def decomposed(content):
    content["normalizer"] = {"type": "NFD"}


def swapped(content):
    vocab = content["model"]["vocab"]
    vocab["e"], vocab["o"] = vocab["o"], vocab["e"]


def added(content):
    last = dict(content["added_tokens"][-1], id=9999, content="bridge", special=False)
    content["added_tokens"].append(last)


def stripped(content):
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}


@pytest.mark.parametrize(
    ("change", "name", "text", "num"),
    [
        (no_bos, "start", "it begins with <|bos|> on A, with none on B", 3),
        (two_bos, "start", "B begins with <|bos|> twice", 3),
        (with_eos, "end", "with <|eos|> on B", 3),
        (lower_case, "normaliser", 'normalised otherwise: "The bridge', 2),
        (stripped, "normaliser", "normalised otherwise: ", 1),
        (decomposed, "normaliser", r'against "A\u0308O\u0308', 1),
        (no_split, "split", "it is split otherwise: ", None),
        (fewer_merges, "merges", "other tokens of the same piece: ", None),
        (swapped, "ids", " is ", None),
        (added, "added", "bridge is one token on B alone", 1),
    ],
)
def test_the_cause_is_named_with_the_texts_that_show_it(original, changed, change, name, text, num):
    """Each change of a tokenizer is one cause, counted over the texts."""
    report = divergence.compare_tokens(original, changed(change), texts=TEXTS)
    assert not report.equal
    assert [cause.name for cause in report.causes] == [name]
    assert text in report.causes[0].text
    assert num is None or report.causes[0].num_texts == num
    assert report.settings, "what the file says otherwise is told as well"


def test_a_tokenizer_is_equal_to_its_copy(original, changed):
    """No cause and no setting is told."""
    report = divergence.compare_tokens(original, changed(lambda content: None), texts=TEXTS)
    assert report.equal and not report.causes and not report.settings
    assert report.num_tokens[0] == report.num_tokens[1] > len(TEXTS)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("<|im_end|>\n", "<|im_end|> \n", "differ in blanks alone"),
        ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n", "B's template goes on"),
        ("<|im_start|>{{", "[{{", "the templates render"),
    ],
)
def test_another_template_is_told_by_what_it_renders(original, changed, old, new, text):
    """Chats differ, and plain texts do not."""

    def edit(folder):
        for file in folder.iterdir():
            written = file.read_text(encoding="utf-8")
            for before, after in ((old, new), (json.dumps(old)[1:-1], json.dumps(new)[1:-1])):
                if before in written and "message" in written:
                    written = written.replace(before, after)
            file.write_text(written, encoding="utf-8")

    other = changed(lambda content: None, edit)
    report = divergence.compare_tokens(original, other, texts=TEXTS, chat=True)
    assert [cause.name for cause in report.causes] == ["template"]
    assert text in report.causes[0].text and report.causes[0].num_texts == 3
    assert divergence.compare_tokens(original, other, texts=TEXTS).equal


def test_the_command_answers_with_its_exit_code(original, changed, tmp_path, invoke):
    """1 where tokens differ, 0 where all are the same."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    other = changed(no_bos)
    code, out, _ = invoke("tokens", original, other, "--texts", texts, "--exit-code")
    assert code == 1
    assert out.startswith("OTHER TOKENS: in 3 of 3 texts; in 3 of them it begins with")
    answer = json.loads(invoke("tokens", original, other, "--texts", texts, "--json")[1])
    assert answer["causes"][0]["facts"][0]["code"] == "tokenizers.start"
    code, out, _ = invoke("tokens", original, original, "--texts", texts, "--exit-code")
    assert code == 0
    assert out.startswith("IDENTICAL: all 3 texts become the same tokens")


def test_a_hub_that_is_out_of_reach_is_named_as_the_reason_at_once(original, monkeypatch):
    """Nothing is tried again; what lies in the cache would be taken."""
    asked = []

    class Away:
        def head(self, url, **options):
            asked.append((url, options))
            raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.utils.get_session", Away)
    with pytest.raises(UsageError, match="the hub cannot be reached") as raised:
        divergence.compare_tokens(original, "nobody/nothing", texts=TEXTS)
    assert "Name or service not known" in raised.value.where
    assert len(asked) == 1 and asked[0][1]["timeout"] <= 10


def test_what_has_no_tokenizer_or_no_text_is_refused(original, tmp_path):
    """With what is missing."""
    with pytest.raises(UsageError, match="has no tokenizer"):
        divergence.compare_tokens(original, tmp_path, texts=TEXTS)
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [1, 2]}\n')
    with pytest.raises(UsageError, match="token ids cannot be tokenised"):
        divergence.compare_tokens(original, original, texts=ids)
    with pytest.raises(PromptError):
        divergence.compare_tokens(original, original, texts=tmp_path / "none.txt")


def set_to(*keys, value):
    """One value of tokenizer.json, by its keys, is another one."""

    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def also_added(content):
    token = next(token for token in content["model"]["vocab"] if token.isalpha() and len(token) > 3)
    number = content["model"]["vocab"][token]
    last = dict(content["added_tokens"][-1], id=number, content=token, special=False)
    content["added_tokens"].append(last)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_to("model", "dropout", value=0.5), "model: BPE, with dropout none / 0.5"),
        (set_to("pre_tokenizer", "use_regex", value=False), "with use_regex true / false"),
        (set_to("added_tokens", 0, "lstrip", value=True), ".lstrip false / true"),
        (
            set_to(
                "truncation",
                value=dict(direction="Left", max_length=4, strategy="LongestFirst", stride=0),
            ),
            "truncation: none / direction Left, max_length 4",
        ),
    ],
)
def test_what_a_file_sets_otherwise_is_told_with_its_value(original, changed, change, text):
    """Whether a text shows it or not."""
    report = divergence.compare_tokens(original, changed(change), texts=["one"])
    assert any(text in setting for setting in report.settings), report.settings


def test_a_length_that_one_side_sets_is_told(original, changed):
    """A value of the tokenizer's configuration that the other one has not."""

    def limited(folder):
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(config | {"model_max_length": 64}), encoding="utf-8")

    report = divergence.compare_tokens(original, changed(lambda c: None, limited), texts=["one"])
    assert any("model_max_length: " in text and text.endswith("64") for text in report.settings)


def test_a_token_that_is_added_on_one_side_alone_is_named(original, changed):
    """Though the other side's vocabulary has it as well, and makes other pieces of the text."""
    folder = changed(also_added)
    token = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"][-1]
    report = divergence.compare_tokens(original, folder, texts=[f"one a{token['content']}b two"])
    (cause,) = report.causes
    assert cause.text == f"{token['content']} is one token on B alone"


EXAMPLES = [[7, *range(20, 20 + num), 8] for num in (12, 17, 25)]


def example(ids, prompt=5, behind=0, pads=(0, 0), first=0):
    """A line as trainers write it: labels behind the prompt alone, pads outside of the mask."""
    labels = [-100] * prompt + ids[prompt : len(ids) - behind] + [-100] * behind
    left, right = ([2] * num for num in pads)
    return {
        "input_ids": (left + ids + right)[first:],
        "attention_mask": [0] * pads[0] + [1] * len(ids) + [0] * pads[1],
        "labels": ([-100] * pads[0] + labels + [-100] * pads[1])[first:],
    }


def cut(ids, part):
    line = example(ids)
    return {key: values[part] for key, values in line.items()}


def moved(ids):
    line = example(ids)
    return {**line, "labels": [*line["labels"][1:], -100]}


def on_pads(ids):
    line = example(ids, pads=(0, 3))
    return {**line, "labels": [*line["labels"][:-3], 2, 2, 2]}


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        (lambda ids: example(ids, prompt=0), "labels before", "5 tokens more of the prompt have"),
        (lambda ids: example(ids, behind=1), "labels behind", "at the end have labels on A: 8"),
        (moved, "labels", "B's labels stand one token too early"),
        (on_pads, "labels", "3 labels on B where attention_mask is 0"),
        (lambda ids: example(ids, pads=(2, 0)), "padding", "left and right: 0 and 0 / 2 and 0"),
        (lambda ids: cut(ids, slice(14)), "cut", "B is cut off at 14 tokens, on the right"),
        (lambda ids: cut(ids, slice(-14, None)), "cut", "B is cut off at 14 tokens, on the left"),
        (lambda ids: cut(ids, slice(1, None)), "start", "A begins with 1 token more: 7"),
        (lambda ids: example([7, *ids]), "start", "B begins with 1 token more, the same again: 7"),
        (lambda ids: example([*ids[:9], 3, *ids[10:]]), "tokens", "token 9 is 28 on A, 3 on B"),
        (lambda ids: {**example(ids), "labels": [-100] * len(ids)}, "labels", "no token has a lab"),
    ],
)
def test_examples_of_two_programs_are_held_against_one_another(tmp_path, invoke, line, name, text):
    """Label masks, truncation, padding and special tokens, without a tokenizer."""
    for file, how in (("a", example), ("b", line)):
        lines = [json.dumps(how(ids)) for ids in EXAMPLES]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    answer = json.loads(invoke("tokens", a, b, "--json")[1])
    assert answer["causes"][0]["name"] == name
    assert text in next(each["text"] for each in answer["causes"] if each["name"] == name)
    assert divergence.compare_tokens(a, a).equal


@pytest.mark.parametrize(
    ("own", "other", "text"),
    [
        (
            {"input_ids": [], "labels": []},
            {"input_ids": [5], "labels": [5]},
            "begins with 1 token more",
        ),
        ({"input_ids": [5], "labels": [5]}, {"input_ids": [5], "labels": [6]}, "label of token 0"),
        ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [5, 6]}, "holds neither labels"),
    ],
)
def test_small_examples_are_told_as_what_they_are(own, other, text, tmp_path, invoke):
    """None, one token, and labels that one side lacks, which is no equality."""
    for name, line in (("a", own), ("b", other)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line), encoding="utf-8")
    answer = json.loads(invoke("tokens", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--json")[1])
    assert answer["num_equal"] == 0 and text in " ".join(each["text"] for each in answer["causes"])


def test_compressed_examples_are_named_as_such(tmp_path, invoke):
    """They are not counted as none."""
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    code, _, err = invoke("tokens", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz")
    assert code == 2 and "b.jsonl.gz" in err and "not compressed" in err


def test_what_is_no_file_of_examples_says_so(original, tmp_path):
    """Lines without ids, other numbers of examples, and tokenizers without texts."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    lines = [[{"text": "one"}], [example(EXAMPLES[0])], [example(ids) for ids in EXAMPLES]]
    for file, rows in zip(files, lines, strict=True):
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(PromptError, match="has no input_ids"):
        divergence.compare_tokens(files[0], files[1])
    with pytest.raises(UsageError, match="holds 1 examples"):
        divergence.compare_tokens(files[1], files[2])
    for other in (original, files[1]):
        with pytest.raises(UsageError, match="over texts"):
            divergence.compare_tokens(original, other)


def test_a_begin_of_text_that_template_and_tokenizer_write_is_told(original, changed):
    """The same tokens where transformers does both, and two of them where a program renders a chat
    and tokenises it then."""
    chat = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    b = changed(lambda c: None, lambda f: (f / "chat_template.jinja").write_text(chat))
    a = shutil.copytree(b, b.parent / "a")
    content = json.loads((a / "tokenizer.json").read_text(encoding="utf-8"))
    no_bos(content)
    (a / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    report = divergence.compare_tokens(a, b, texts=TEXTS, chat=True)
    (cause,) = report.causes
    assert report.equal and (cause.name, cause.num_texts) == ("twice", 3)
    assert cause.text.startswith("B begins with <|bos|> twice where it is rendered first")
    assert not divergence.compare_tokens(b, b, texts=TEXTS, chat=True).causes


def test_what_is_cut_off_and_which_texts_are_concerned_is_told(original, changed):
    """Equal tokens that a limit of one side cuts; and the class that holds the texts of a cause."""

    def limited(folder):
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config |= {"model_max_length": 4, "truncation_side": "left"}
        file.write_text(json.dumps(config), encoding="utf-8")

    report = divergence.compare_tokens(original, changed(lambda c: None, limited), texts=TEXTS)
    (cause,) = report.causes
    assert report.equal and cause.name == "truncation"
    assert cause.text.endswith("tokens, and B 4, cut off on the left")


def test_a_class_of_texts_that_holds_all_of_a_cause_is_named(original, changed):
    """Digits that are split one by one."""

    def one_by_one(content):
        parts = [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}

    texts = ["built in 1890", "no 12", "none here", "nor here"]
    (cause,) = divergence.compare_tokens(original, changed(one_by_one), texts=texts).causes
    assert cause.text.endswith("; 2 of the 2 texts with digits, and no other")


def test_label_masks_of_two_templates_are_compared(original, tmp_path):
    """{% generation %} that holds the end of an answer on one side alone."""
    texts = tmp_path / "chats.json"
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    texts.write_text(json.dumps([{"messages": said}]))
    ends = (
        "{{ m.content }}<|im_end|>{% endgeneration %}",
        "{{ m.content }}{% endgeneration %}<|im_end|>",
    )
    for name, end in zip("xy", ends, strict=True):
        shutil.copytree(original, tmp_path / name)
        template = "{% for m in messages %}{% generation %}" + end + "{% endfor %}"
        (tmp_path / name / "chat_template.jinja").write_text(template)
    report = divergence.compare_tokens(tmp_path / "x", tmp_path / "y", texts=texts)
    assert not report.equal and [cause.name for cause in report.causes][-1] == "labels behind"
    assert report.causes[-1].text == '1 token more at the end have labels on A: "<|im_end|>"'
