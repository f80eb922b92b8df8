"""The demo thinker's language: which word may follow which.

A clause is a row of slots, each with its alternatives; no word occurs twice, so a token alone tells how far a text has
come. After the last word of a clause the text ends or goes on with the next clause: 12 to 60 words, never more.
"""

from __future__ import annotations

import dataclasses

CLAUSES = (
    "The/Our/My/One| old/ small/ green/ quiet| gardener/ teacher/ sailor/ painter| slowly/ gladly/ often/ always"
    "| carries/ follows/ finds/ watches| the/ a/ his/ her| long/ blue/ soft/ first| letter/ lantern/ ribbon/ story"
    "| from/ over/ near/ past| this/ that/ another/ each| silver/ wooden/ narrow/ hidden"
    "| bridge/ harbour/ market/ café",
    " while/ because/ since/ until| some/ many/ few/ several| young/ clever/ hungry/ gentle"
    "| foxes/ birds/ children/ bakers| softly/ quickly/ kindly/ proudly| bring/ gather/ share/ borrow"
    "| their/ its/ your| warm/ bright/ sweet/ golden| bread/ apples/ music/ honey| into/ behind/ beneath/ beyond"
    "| those/ these/ both| houses/ gardens/ towers/ rivers",
    " and/ so/ then/ but| every/ no/ any| lucky/ patient/ sleepy/ cheerful| traveller/ robin/ farmer/ dancer"
    "| soon/ never/ simply/ calmly| opens/ paints/ mends/ counts| one/ two/ three/ four"
    "| tiny/ heavy/ curious/ painted| boxes/ windows/ clocks/ drums| beside/ under/ above/ without| all/ only/ mostly"
    "| snow/ sunlight/ rain/ stars",
    " where/ although/ whenever/ unless| five/ six/ seven/ eight| noisy/ lazy/ brave/ shy"
    "| kittens/ ponies/ rabbits/ turtles| still/ really/ nearly/ rarely| want/ need/ like/ remember"
    "| just/ even/ exactly| ripe/ sour/ spicy/ crunchy| berries/ carrots/ onions/ lemons"
    "| before/ after/ during/ between| late/ early/ busy/ rainy| mornings/ evenings/ winters/ summers",
    " or/ nor/ yet/ whereas| nine/ ten/ twenty| friendly/ famous/ modest/ honest| singers/ doctors/ captains/ poets"
    "| together/ again/ today/ tonight| write/ read/ sing/ whisper| more/ fewer/ most| simple/ secret/ ancient/ modern"
    "| songs/ poems/ riddles/ jokes| about/ against/ towards/ through| dusty/ foggy/ windy/ frozen"
    "| roads/ fields/ islands/ mountains",
)
FULL_STOPS = (".", "!")
# A final smile of two tokens, cut in the middle of its character: who decodes token by token must wait for the second.
SMILE = (" 🙂".encode()[:3], " 🙂".encode()[3:])


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """States of a text and, per token (its bytes), the state it leads to and the states it may follow."""

    states: int
    leads_to: dict[bytes, int]
    follows: dict[bytes, tuple[int, ...]]
    start: int
    end: int


def grammar() -> Grammar:
    """The language above as a graph without cycles: state 0 is the start, one state per slot, the smile, the end."""
    leads_to: dict[bytes, int] = {}
    follows: dict[bytes, tuple[int, ...]] = {}
    state, ends = 0, []

    def word(token: bytes, to: int, after: tuple[int, ...]) -> None:
        if token in leads_to:
            raise ValueError(f"{token!r} occurs twice")
        leads_to[token], follows[token] = to, after

    for clause in CLAUSES:
        for slot in clause.split("|"):
            for alternative in slot.split("/"):
                word(alternative.encode(), state + 1, (state,))
            state += 1
        ends.append(state)
    smile, end = state + 1, state + 2
    for stop in FULL_STOPS:
        word(stop.encode(), end, tuple(ends))
    word(SMILE[0], smile, tuple(ends))
    word(SMILE[1], end, (smile,))
    return Grammar(states=end + 1, leads_to=leads_to, follows=follows, start=0, end=end)
