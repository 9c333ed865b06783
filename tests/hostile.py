"""JSON that means harm: values, names, and documents in which one thing is such."""

import json
import random
from typing import Any

HOSTILE = [
    *("null", "true", "-1", "0", "1", "3", "1.5", "-0.0", "1e999", "-1e999", "1e-999", "NaN"),
    *("Infinity", "-Infinity", '""', '"F32"', '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]", "[0]"),
    *(str(sign * (2**power + more)) for sign in (1, -1) for power in (31, 32, 53, 62, 63, 64, 128)
      for more in (-1, 0, 1)),
    *("9" * 400, "9" * 4000, "9" * 5000, "-" + "9" * 4300, "0.1" + "1" * 5000, "1e" + "9" * 5000),
    *("[" * depth + "]" * depth for depth in (20, 33, 120, 130, 400, 900, 985, 1100, 20_000)),
    *('{"a":' * depth + "0" + "}" * depth for depth in (33, 127, 500, 990, 5000)),
    *("[0,0]", "[0,4]", "[4,0]", "[-4,0]", "[0,1e1]", f"[0,{2**64 - 1}]", f"[{2**63},{2**63}]"),
    *(f"[0,{2**62}]", f"[0,{2**33},{2**33}]", f"[{2**33},{2**33},0]", f"[{2**32},{2**32}]"),
    *("[0" + ",1" * 70 + "]", "[" + ",".join("1" * 65) + "]", "[1]", "[1,1,1,1]", "[true]"),
    # A second key of the same name, wherever these stand.
    *('0,"round":-1', '0,"values":[]', '0,"dtype":"F64"', '0,"shape":[9]', '0,"data_offsets":[9]'),
    *('{"a":0,"a":1}', '{"coterie":"{}"}', '{"round":0,"values":{}}', "0}", "0]", "0//", "\x00"),
]  # fmt: skip
NAMES = ["x", "", "__metadata__", "a/b", "é\n", "\x00", "coterie", "round", "values", "n" * 300]
NAMES += ["format", "bob:a/b", "bob:ann:a/b", ":a/b", "a:/b", "a:" * 9 + "a/b", "a:" * 2000 + "a/b"]


def replace_one(tree: Any, rng: random.Random) -> str:
    """Return a tree as JSON with a hostile value for one of its nodes, keys or entries."""
    places: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo:
        node = todo.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        todo += [child for key in keys if isinstance(child := node[key], dict | list)]
    if places:
        node, key = rng.choice(places)
        match rng.randrange(6):
            case 0 if isinstance(node, dict):
                node[rng.choice(NAMES)] = node.pop(key)
            case 1:
                del node[key]
            case _:
                node[key] = "@"
    return json.dumps(tree).replace('"@"', rng.choice(HOSTILE))
