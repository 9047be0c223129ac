"""How grammars are compiled, and what is too large for that."""

from __future__ import annotations

from dataclasses import dataclass

from luce.config.settings import Config


@dataclass(frozen=True)
class GrammarOptions:
    """What settings say about the grammars of a model."""

    #: that a grammar may take to compile
    seconds: float = 5.0
    #: of the text of a format
    schema_max_kib: int = 256
    #: of the text of all tools
    tools_max_kib: int = 2048
    #: JSON has one space behind each comma and colon, and no other white space
    compact_json: bool = False

    @classmethod
    def of(cls, config: Config) -> GrammarOptions:
        """What the settings say."""
        compact = config.json_spacing == "compact"
        return cls(config.grammar_seconds, config.schema_max_kib, config.tools_max_kib, compact)
