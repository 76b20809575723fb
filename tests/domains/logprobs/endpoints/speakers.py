"""How other servers than vLLM speak, as their sources and documents have it: the stub's tongues.

Each form was written from the server's own code or documents, not from what divergence reads:
SGLang 0.5 (managers/tokenizer_manager.py), llama.cpp (tools/server), TGI 3 (its OpenAPI file),
OpenAI's legacy completions with ``echo``, and chat completions.
"""


def _text(token: int) -> str:
    return f"<{token}>"


def _likeliest(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda n: -row[n])[:count]


def _vllm(stub, body: dict) -> dict:
    return stub.completions(body)


def _tokenize(stub, body: dict) -> dict:
    ids = stub.read(body["prompt"]) if "prompt" in body else _render(stub, body["messages"])
    return {"tokens": ids, "count": len(ids), "max_model_len": 512}


def _render(stub, messages: list[dict]) -> list[int]:
    return stub.read("".join(f"[{one['role']}]{one['content']}" for one in messages))


def _chat(stub, body: dict) -> dict:
    """OpenAI's; vLLM's fields where ``ids`` are not lacking."""
    ids = _render(stub, body["messages"])
    tokens, rows = stub.go_on(
        ids, body["max_tokens"], body["seed"] if body["temperature"] else None
    )
    told = body.get("return_token_ids") and "ids" not in stub.lacks
    name = (lambda n: f"token_id:{n}") if told else _text
    content = [
        {
            "token": name(token),
            "logprob": row[token],
            "bytes": list(_text(token).encode()),
            "top_logprobs": [
                {"token": name(n), "logprob": row[n], "bytes": None}
                for n in _likeliest(row, body.get("top_logprobs", 0))
            ],
        }
        for token, row in zip(tokens, rows, strict=True)
    ]
    choice: dict = {
        "index": 0,
        "finish_reason": "length",
        "message": {"role": "assistant", "content": "".join(map(_text, tokens))},
        "logprobs": {"content": content} if body.get("logprobs") else None,
    }
    found = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
    if told:
        choice["token_ids"], found["prompt_token_ids"] = tokens, ids
    return found


def _openai(stub, body: dict) -> dict:
    """The legacy route: up to five log-probabilities, ``echo``, nothing of vLLM's."""
    unknown = set(body) & {"prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
    if unknown:
        raise ValueError(f"unrecognized request arguments: {sorted(unknown)}")
    if (body.get("logprobs") or 0) > 5:
        raise ValueError("logprobs must be at most 5")
    ids = stub.read(body["prompt"])
    tokens, rows = stub.go_on(ids, body["max_tokens"])
    told, lists = list(tokens), [dict(enumerate(row)) for row in rows]
    if body.get("echo"):
        told = [*ids, *told]
        before = [dict(enumerate(stub.logits(ids[:n]))) for n in range(1, len(ids))]
        lists = [None, *before, *lists]
    choice = {
        "text": "".join(map(_text, told)),
        "finish_reason": "length",
        "logprobs": {
            "tokens": [_text(n) for n in told],
            "token_logprobs": [
                None if one is None else one[n] for one, n in zip(lists, told, strict=True)
            ],
            "top_logprobs": [
                None
                if one is None
                else {_text(n): one[n] for n in _likeliest(list(one.values()), body["logprobs"])}
                for one in lists
            ],
            "text_offset": list(range(len(told))),
        },
    }
    return {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}


def _sglang(stub, body: dict) -> dict:
    ids = stub.read(body.get("input_ids") or body["text"])
    asked = body["sampling_params"]
    tokens, rows = stub.go_on(ids, asked["max_new_tokens"], asked.get("sampling_seed"))
    top = body["top_logprobs_num"]

    def entry(row: list[float] | None, token: int) -> list:
        return [None if row is None else row[token], token, _text(token)]

    def listed(row: list[float] | None) -> list | None:
        return None if row is None else [entry(row, n) for n in _likeliest(row, top)]

    before = [None, *(stub.logits(ids[:n]) for n in range(1, len(ids)))]
    return {
        "text": "".join(map(_text, tokens)),
        "output_ids": tokens,
        "meta_info": {
            "id": "1",
            "finish_reason": {"type": "length", "length": len(tokens)},
            "prompt_tokens": len(ids),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "input_token_logprobs": [entry(r, n) for r, n in zip(before, ids, strict=True)],
            "output_token_logprobs": [entry(r, n) for r, n in zip(rows, tokens, strict=True)],
            "input_top_logprobs": [listed(row) for row in before],
            "output_top_logprobs": [listed(row) for row in rows],
        },
    }


def _llama(stub, body: dict) -> dict:
    ids = stub.read(body["prompt"])
    tokens, rows = stub.go_on(ids, body["n_predict"], body["seed"] if body["temperature"] else None)

    def entry(row: list[float], token: int) -> dict:
        text = _text(token)
        return {"id": token, "token": text, "bytes": list(text.encode()), "logprob": row[token]}

    return {
        "index": 0,
        "content": "".join(map(_text, tokens)),
        "tokens": tokens,
        "stop": True,
        "tokens_predicted": len(tokens),
        "tokens_evaluated": len(ids),
        "stop_type": "limit",
        "completion_probabilities": [
            entry(row, token)
            | {"top_logprobs": [entry(row, n) for n in _likeliest(row, body["n_probs"])]}
            for row, token in zip(rows, tokens, strict=True)
        ],
    }


def _llama_tokens(stub, body: dict) -> dict:
    assert body["add_special"]
    return {"tokens": stub.read(body["content"])}


def _tgi(stub, body: dict) -> dict:
    ids, asked = stub.read(body["inputs"]), body["parameters"]
    tokens, rows = stub.go_on(
        ids, asked["max_new_tokens"], asked["seed"] if asked["do_sample"] else None
    )

    def entry(row: list[float] | None, token: int) -> dict:
        value = None if row is None else row[token]
        return {"id": token, "text": _text(token), "logprob": value, "special": False}

    before = [None, *(stub.logits(ids[:n]) for n in range(1, len(ids)))]
    return {
        "generated_text": "".join(map(_text, tokens)),
        "details": {
            "finish_reason": "length",
            "generated_tokens": len(tokens),
            "seed": None,
            "prefill": [
                {k: v for k, v in entry(row, n).items() if k != "special"}
                for row, n in zip(before, ids, strict=True)
            ],
            "tokens": [entry(row, n) for row, n in zip(rows, tokens, strict=True)],
            "top_tokens": [
                [entry(row, n) for n in _likeliest(row, asked["top_n_tokens"])] for row in rows
            ],
        },
    }


def _models(owner: str) -> dict:
    return {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": owner}]}


GET: dict[str, dict[str, dict]] = {
    "vllm": {"/v1/models": _models("vllm"), "/version": {"version": "0.0.stub"}},
    "openai": {"/v1/models": _models("somebody")},
    "mindie": {"/v1/models": _models("MindIE Server")},
    "sglang": {
        "/v1/models": _models("sglang"),
        "/get_server_info": {"version": "0.5.3", "dtype": "bfloat16", "model_path": "tiny"},
    },
    "llama.cpp": {"/v1/models": _models("llamacpp"), "/props": {"build_info": "b6000-abc"}},
    "tgi": {"/info": {"version": "3.3.4", "model_dtype": "torch.float16", "model_id": "tiny"}},
}
POST = {
    "vllm": {"/v1/completions": _vllm, "/v1/chat/completions": _chat, "/tokenize": _tokenize},
    "openai": {"/v1/completions": _openai, "/v1/chat/completions": _chat},
    "mindie": {"/v1/completions": _openai, "/v1/chat/completions": _chat},
    "sglang": {"/generate": _sglang, "/v1/chat/completions": _chat, "/tokenize": _tokenize},
    "llama.cpp": {
        "/completion": _llama,
        "/tokenize": _llama_tokens,
        "/v1/chat/completions": _chat,
        "/apply-template": lambda stub, body: {
            "prompt": "".join(f"[{one['role']}]{one['content']}" for one in body["messages"])
        },
    },
    "tgi": {"/generate": _tgi},
}
