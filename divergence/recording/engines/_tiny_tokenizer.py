"""The tokenizer of the tiny models: byte-level BPE, trained on the spot on the text below.

Byte-level, so any text survives the round trip, and trained, so that words fall into pieces of
uneven length as in a real model. The trainer breaks ties by token id, which makes the result the
same on every machine for one version of the ``tokenizers`` library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

# Comes with transformers.
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

__all__ = ["BOS", "CHAT_TEMPLATE", "EOS", "MASK", "NUM_SPECIAL", "PAD", "Wrap", "write_tokenizer"]

Wrap = Literal["none", "bos", "eos", "both"]

_SPECIAL = ("<|pad|>", "<|eos|>", "<|bos|>", "<|mask|>", "<|im_start|>", "<|im_end|>")
PAD, EOS, BOS, MASK = range(4)
"""Token ids. T5 wants pad 0 and eos 1; the others do not care."""

NUM_SPECIAL = len(_SPECIAL)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = """\
A bridge is built twice: once on paper, where every beam is exact, and once in steel, where every
beam is a little too long or a little too short. The engineer who forgets the second bridge will be
surprised by the first winter. Numbers in a machine are beams of steel. Each of them is rounded, and
each rounding is harmless, until someone adds ten thousand of them in another order.

The harbour was quiet in the early morning. Fishing boats came back with the tide, gulls followed
them, and the lamps along the quay went out one after another. An old woman sold bread and coffee
from a green cart. She knew the name of every captain, what he owed, and whether he would pay. When
strangers asked her for the way to the station she pointed at the hill and said: follow the bells.

Where does a river begin? Children answer with a spring, a hole in a rock from which cold water
comes. Geographers draw a line around all the land whose rain ends in the same sea. Both are right,
and both maps are useful, but only one of them tells you why the village flooded in April.

To bake a simple loaf you need flour, water, salt and time. Mix five hundred grams of flour with
three hundred and fifty grams of lukewarm water, wait half an hour, then add ten grams of salt and a
spoon of last week's dough. Fold it four times. Leave it in the kitchen overnight. In the morning
heat the oven to two hundred and forty degrees and bake until the crust sounds hollow.

The museum closes at six. Visitors are asked not to touch the instruments: the telescope of 1781,
the brass clock, the two balances and the glass prisms. On Thursdays the curator shows how light is
split, how a pendulum counts seconds, and how a wrong lens once hid a planet from half of Europe.

Question: Which weighs more, a kilogram of feathers or a kilogram of iron? Answer: They weigh the
same. Question: Name three animals that sleep through the winter. Answer: hedgehogs, dormice, bats.
Question: What is the capital of France? Answer: Paris. Question: Who measured the speed of light?
Answer: Ole Rømer, in 1676, from the eclipses of Io, a moon of Jupiter. Translate: good morning;
guten Morgen; bonjour; buenos días; доброе утро; おはようございます; 早上好.

The committee met for the third time and agreed on nothing except the date of the fourth meeting.
Minutes were taken, circulated, corrected and filed. Nobody noticed that page seven described a
different committee altogether, with other members, better coffee and a decision.

清晨的山谷里有雾。农夫牵着一头老牛走过石桥,桥下的水很浅,可以看见白色的石头和小鱼。
他说:今年的雨来得晚,稻子长得慢,但是不要着急,日子还长。村口的学校刚刚敲钟,孩子们跑进教室,
老师在黑板上写下一个问题:如果两台机器算同一道题,得到的数字不一样,应该相信哪一台?
有的孩子说相信新的,有的孩子说相信贵的。最小的孩子想了很久,说:把题目拆开,一步一步地比较,
看看从哪一步开始不一样。老师笑了,说这就是今天的答案。人工智能、模型、计算、语言、数学、误差。

def mean(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else float("nan")

class Queue:
    def __init__(self, capacity: int = 16):
        self.items = [None] * capacity
        self.head, self.size = 0, 0

    def push(self, item):
        if self.size == len(self.items):
            raise OverflowError(f"queue is full: {self.size} items")
        self.items[(self.head + self.size) % len(self.items)] = item
        self.size += 1

for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }  /* dot product */
SELECT name, count(*) AS visits FROM guests WHERE year >= 1999 GROUP BY name ORDER BY visits DESC;
{"id": 42, "title": "Notes on rounding", "tags": ["float", "bfloat16", "ulp"], "score": -3.5e-4}

Snow fell on the railway for nine days. The telegraph still worked, so each station knew exactly how
lonely the others were. At the junction the signalman read aloud from an encyclopedia, letter by
letter, volume after volume, and forty miles of shivering operators learned about abacus, aardvark,
barometer, butterfly, cartography and cinnamon before the plough finally arrived from the south.

If the temperature rises, the metal expands; if the metal expands, the contact opens; if the contact
opens, the heater stops. Therefore a thermostat is an argument. It may be slow, it may be crude, yet
it never begs the question. Compare the average politician, philosopher or committee chairman.

My grandfather repaired violins, radios, umbrellas, locks and, during the war, bicycles. He used to
say that broken things speak clearly whereas working things mumble. Listen, he whispered, holding a
cracked instrument beside my ear: somewhere between the bridge and the scroll something buzzes. Do
not guess. Press here, then here, then further up, until the noise changes. There it is.

A dictionary of weather: drizzle, downpour, hail, sleet, thunderstorm, breeze, hurricane, mist. Of
tools: hammer, chisel, screwdriver, pliers, soldering iron, microscope, crowbar, lathe. Of music:
adagio, fugue, rhythm, harmony, clarinet, trumpet, lullaby, percussion. Of kitchens: cupboard,
saucepan, vinegar, parsley, marmalade, dumplings, grater, tablecloth. Of governments: parliament,
treaty, constitution, minister, embassy, province, taxation, referendum. Of the body: shoulder,
eyelash, kidney, muscle, skeleton, forehead, bloodstream, thumb.

天气预报说明天有大风,飞机可能晚点。图书馆里坐满了准备考试的学生,窗外的樱花已经开了。
医生建议他多喝水、早睡觉、少看手机。火车经过长江大桥的时候,妹妹正在画一只红色的狐狸。
"""


def write_tokenizer(
    directory: Path,
    *,
    vocab_size: int,
    wrap: Wrap,
    chat_template: bool,
) -> None:
    """Train to exactly ``vocab_size`` tokens; write tokenizer.json and tokenizer_config.json.

    ``wrap``: which special tokens the tokenizer itself puts around a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"a vocabulary of {vocab_size} does not fit the text: "
            f"it gives {tokenizer.get_vocab_size()} tokens"
        )
    if wrap != "none":
        before = f"{_SPECIAL[BOS]} " if wrap in ("bos", "both") else ""
        after = f" {_SPECIAL[EOS]}" if wrap in ("eos", "both") else ""
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{after}",
            special_tokens=[(_SPECIAL[token], token) for token in (BOS, EOS)],
        )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[PAD],
        "bos_token": _SPECIAL[BOS],
        "eos_token": _SPECIAL[EOS],
        "mask_token": _SPECIAL[MASK],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 512,
    }
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    text = json.dumps(settings, indent=2, sort_keys=True)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
