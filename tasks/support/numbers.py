r"""Numbers as models write them: 9{,}500, 12 000, 1e5, 1.5 \times 10^5, 3/4, \frac{3}{4}, –5.

Exact, and linear in the text.
"""

import re
from decimal import Context, Inexact
from fractions import Fraction

MOST_DIGITS = 1000  # of a number or a power: more would take time, and answers nothing
SUPERSCRIPTS = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
LOWERED = str.maketrans(SUPERSCRIPTS, "-0123456789")
COMMA = r"(?:,(?:\\!)?|\{,\})"
SEPARATOR = rf"(?:{COMMA}|\\[,;:! ]|['’~ \u00a0\u2009\u202f])"  # before three digits
INDIAN = rf"(?<!\d{{3}})(?:{COMMA}\d\d){{1,7}}{COMMA}\d{{3}}(?!\d)"  # what follows in 1,00,000
# Groups are not possessive: Python before 3.11.5 (Debian 12's) would keep half of one that fails.
DECIMAL = r"\d++(?:\.\d++)?"
WHOLE = r"\s*+(?:\{\s*+([-+]?\d++)\s*+\}|\(\s*+([-+]?\d++)\s*+\)|([-+]?\d++))"  # an exponent
PART = rf"\s*+(?:\{{\s*+([-+]?{DECIMAL})\s*+\}}|(\d))"  # of a fraction
# Rewritten one after the other, so that what is left is 9500, 1.5e5, 3/4 and 10^5.
REWRITTEN = [
    ("[−–‐‑－]", "-"),
    ("⁄", "/"),
    (f"[{SUPERSCRIPTS}]++", lambda match: f"^{{{match[0].translate(LOWERED)}}}"),
    # 1,000 and 1{,}000 and 1\,000 and 1'000, and with a space, narrow or not
    (
        rf"(?<![\w^])(?<!\d\.)(?<!\^\{{)\d{{1,3}}+(?:{INDIAN}|(?:{SEPARATOR}\d{{3}}(?!\d))+)",
        lambda match: re.sub(r"\D", "", match[0]),
    ),
    (r"(?<=\d) *+(?=\\[dtc]?frac)", " "),  # 1\frac{1}{2}
    (rf"\\[dtc]?frac{PART}{PART}", r"\1\2/\3\4"),
    (rf"(?<=\d)(?:\s|\\,)*(?:\\times|\\cdot|[×xX*·⋅])\s*+10\s*+(?:\^|\*\*){WHOLE}", r"e\1\2\3"),
]
REWRITTEN = [(re.compile(pattern), by) for pattern, by in REWRITTEN]
# Exponents that are not whole numbers: such a power has no value here.
OTHER = rf"\s*+(?:[{{(](?=[^{{}}()]*\d)[^{{}}()]*+|[-+]?{DECIMAL})"
# A minus is a sign only if it touches the number, and nothing that it could be subtracted from.
NUMBER = re.compile(
    rf"\^{OTHER}"  # skip exponents of other things, as in m^2
    r"|(?P<sign>(?<![\w)%])[-+])?(?:\\?\$|[€£¥₹])?(?<![\^\d])(?<!\^[-+{(])(?<!\^[{(][-+])(?:"
    rf"(?<!/)(?:(?P<whole>\d++)\ ++)?(?P<over>{DECIMAL})\s*+/\s*+(?P<under>{DECIMAL})(?!\s*+/)"
    rf"|(?P<plain>(?:{DECIMAL}|(?<![\w.])\.\d++)(?:[eE][-+]?\d++(?!\w))?)"
    rf"(?P<power>\s*+\^(?:{WHOLE}(?!\s*+[\^(]|\.\d)|{OTHER}))?)"
)


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text; None if there is none, or the last has no value here."""
    last = None
    for match in NUMBER.finditer(rewritten(text)):
        last = match if match["plain"] or match["over"] else last
    return value(last) if last else None


def read_number(text: str) -> Fraction | None:
    """Return the number that a text is, but for signs of money, percent and markup; None else."""
    text = re.sub(r"\\[()]", "", rewritten(text)).strip()
    match = NUMBER.fullmatch(text.lstrip(" $*").rstrip(" $%.\\*"))
    return value(match) if match and (match["plain"] or match["over"]) else None


def plain(number: Fraction | None) -> str | None:
    """Write a number as 1234.5, or as 1/3 if it has no end so; None for None.

    Equal numbers, and only these, have equal texts.
    """
    if number is None:
        return None
    context = Context(prec=MOST_DIGITS)
    decimal = context.divide(number.numerator, number.denominator)
    return str(number) if context.flags[Inexact] else f"{decimal:f}"


def rewritten(text: str) -> str:
    """Write the numbers of a text in plain digits."""
    for pattern, by in REWRITTEN:
        text = pattern.sub(by, text)
    return text


def value(match: re.Match) -> Fraction | None:
    """Compute what NUMBER has found; None for a division by 0, or what is too long or no number."""
    plain, over, under, whole = match.group("plain", "over", "under", "whole")
    digits, _, e = (plain or over).lower().partition("e")
    exponent = next(filter(None, match.groups()[-3:]), "")
    if max(len(digits), len(under or ""), len(whole or "")) > MOST_DIGITS:
        return None
    if max(len(e), len(exponent)) > 4 or (match["power"] and not exponent):
        return None
    e, exponent = int(e or 0), int(exponent or 1)
    if max(1, abs(exponent)) * (len(digits) + abs(e)) > MOST_DIGITS:
        return None
    sign = -1 if match["sign"] == "-" else 1
    try:
        if over:
            part = Fraction(over) / Fraction(under)
            return sign * (part + int(whole) if whole and part < 1 else part)
        return sign * Fraction(plain) ** exponent
    except ZeroDivisionError:
        return None
