"""Reading of vocabularies from files, folders and the Hugging Face hub."""

from pathlib import Path

from tokenizers import Tokenizer

from coterie.alignment.vocabulary import Vocabulary, byte_level, roles_of, spelled
from coterie.bases import EMBEDDED, load_tokenizer
from coterie.errors import CoterieError
from coterie.files import parse_json, read_file

REMEDY = (
    "download the tokenizer.json of the language model. To read a SentencePiece or tiktoken model "
    "instead, install sentencepiece or tiktoken and give the folder that contains tokenizer.model"
)


def read_vocabulary(tokenizer: str | Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer.

    Args:
        tokenizer: A built-in base, a folder, a file, or a name on the Hugging Face hub. A file
            must be a tokenizer.json, or the vocab.json of a byte-level BPE tokenizer. A folder must
            contain one of these files or be readable by `AutoTokenizer`.

    Raises:
        CoterieError: There is no tokenizer, or transformers cannot read it.
    """
    path = Path(tokenizer)
    if not path.exists() or (EMBEDDED / path / "config.json").exists():
        name = str(tokenizer)
        return _loaded(name, f"No tokenizer could be loaded from {name!r}.")
    file = path if path.is_file() else _file(path)
    if file is None:
        return _loaded(str(path.resolve()), f"No tokenizer could be read from {path}; {REMEDY}.")
    if file.suffix != ".json":
        raise CoterieError(f"{file} is not a tokenizer.json or a vocab.json; {REMEDY}.")
    try:
        content = parse_json(read_file(file))
        if isinstance(content.get("model"), dict):
            return Vocabulary.of(Tokenizer.from_file(str(file)))
        return spelled(
            {i: byte_level(token) for token, i in content.items()}, (), roles_of(content)
        )
    except OSError:
        raise
    # The tokenizers library raises plain Exception, and malformed content several other classes.
    except Exception as error:
        raise CoterieError(
            f"No vocabulary could be read from {file}: the file is damaged or has a different "
            "format; download the tokenizer again."
        ) from error


def _file(folder: Path) -> Path | None:
    """Return the file that completely describes the tokenizer in a folder.

    If no file describes the tokenizer completely, return None. `AutoTokenizer` must then read the
    folder.
    """
    if (folder / "tokenizer.json").exists():
        has_roles = (folder / "tokenizer_config.json").exists()
        return None if has_roles else folder / "tokenizer.json"
    return folder / "vocab.json" if (folder / "vocab.json").exists() else None


def _loaded(name: str, refusal: str) -> Vocabulary:
    try:
        tokenizer = load_tokenizer(name)
    except CoterieError as error:
        raise CoterieError(f"{refusal} {error}") from error
    return Vocabulary.of(tokenizer)
