"""Numbers as models write them: the value of each, what is none, and that none takes long."""

import time
from fractions import Fraction

import pytest

from tasks.support.numbers import last_number, read_number

# What stands before the colon has the value behind it; — is none.
LAST = r"""
The total is \boxed{9{,}500}. : 9500 | pays 1{,}000 dollars : 1000 | It is 1\,000. : 1000
1\;000 or 10,\!000 : 10000 | about 12 000 people : 12000 | 1'000'000 francs : 1000000
The answer is 1e5. : 100000 | 2.5E-3 : 0.0025 | 1.5 \times 10^5 : 150000 | 6 \cdot 10^{-3} : 0.006
1.5×10⁵ : 150000 | 3 * 10**2 : 300 | 3/4 : 3/4 | -1 / 2 : -1/2 | \frac{3}{4} : 3/4
-\dfrac{1{,}000}{3}. : -1000/3 | \frac34 : 3/4 | 1\frac{1}{2} : 3/2 | 2 1/2 cups : 5/2
10^5 : 100000 | 2^{-3} : 1/8 | the area is 25 m^2 : 25 | x^{10} is 3 : 3 | 25 m² : 25
the balance is –5 : -5 | −5.50 : -5.5 | pages 3–5 : 5 | 12-5 : 5 | x - 5 : 5 | -5% : -5
$1,234.50 : 1234.5 | -$5 : -5 | on 5/12/2024 : 2024 | in 2020 500 people : 500 | 1,2345 : 2345
-.5 : -0.5 | No idea. : — | 10^999999999 : — | 10^(10^9) : — | 10^{10^{10^{9}}} : —
the answer is **42** : 42 | **5**: no : 5 | 45^\circ : 45 | 5^{th} : 5 | \frac{-1}{2} : -1/2
1~000 : 1000 | in Q1 100 units : 100 | 25 m^2 500 g : 500 | 7e999^300 : — | 6 ⋅ 10^5 : 600000
 2^10 = 1024 : 1024 | 10^{3} : 1000 | 12,345.60 : 12345.6 | 6:30 : 30
1e999999999 : — | 1/0 : — | 0^-1 : — | 2^{3+4} : — | 4^0.5 : —
₹1,00,000 : 100000 | 12,34,567.5 : 1234567.5 | 1{,}00{,}00{,}000 : 10000000 | 1,00,00 : 0
in 100,20,300 : 20300 | Rs.1,00,000 : 100000 | Rs. 1,000 : 1000 | 0.123,456 : 456
"""
WHOLE = r"""
3/4 : 3/4 | 1e5 : 100000 | 72 : 72 | 1,234 : 1234 | 7.0 : 7 | $72$ : 72 | 72%. : 72 | -\frac12 : -.5
$-3$ : -3 | 50 \% : 50 | \(72\) : 72 | **42** : 42 | .5 : .5 | (1,100) : — | (5 : — | 1e9999 : —
₹1,00,000 : 100000
12 m^2 : — | 2024-05-01 : — | between 3 and 5 : — | 72 apples : — | 1, 2 : — | x : — | 10^(10^9) : —
"""


def cases(table: str) -> list[tuple[str, Fraction | None]]:
    pairs = [cell.rsplit(" : ", 1) for cell in table.strip().replace("\n", "|").split("|")]
    return [(t.strip(), None if "—" in of else Fraction(of.strip())) for t, of in pairs]


READ = [(last_number, *case) for case in cases(LAST)]
READ += [(read_number, *case) for case in cases(WHOLE)]
READ += [(last_number, f"12{space}000", 12000) for space in "\u00a0\u202f\u2009"]


@pytest.mark.parametrize("read, text, expected", READ)
def test_a_response_has_its_last_number_and_a_gold_answer_is_nothing_else(read, text, expected):
    assert read(text) == expected


PARTS = r"1|1,111|1,11|1/|1^{|\frac{1|^(|1 |10^|1e|1 \times |¹|1'000| |**".split("|")


@pytest.mark.parametrize("part", PARTS)
def test_the_time_is_linear_in_the_text(part):
    def seconds(count: int) -> float:
        start = time.process_time()
        last_number(part * count)
        return time.process_time() - start

    seconds(1000)
    assert seconds(40_000) < 40 * max(seconds(5_000), 0.002), "eight times, with room for noise"
