"""The questions of the demonstration: conversations of a few turns with two system prompts.

System prompts and first questions are long, and each turn repeats all turns before it, as is usual
where a prefix cache helps.
"""

from __future__ import annotations

from dataclasses import dataclass

MUSEUM = """\
You are the guide of a small museum of water power. Answer in one or two short sentences, and \
only about what is asked. The museum stands beside an old weir. On the ground floor there is a \
wooden mill wheel from 1820 that still turns in spring, when the river is high. On the first \
floor there is a turbine hall with three turbines: a Francis turbine, a Kaplan turbine and a \
Pelton turbine, which was given by a village in the mountains. Under the roof there is a model of \
a dam with a penstock, the pipe that brings water from the reservoir to the turbine, and a valve \
that children may open and close. The museum is open from Tuesday to Sunday, from ten in the \
morning to five in the afternoon. Tickets cost four euros for adults; children pay nothing. There \
is a small cafe in the yard, and a path along the river that leads to the station."""

BAKERY = """\
You are a teacher of baking who helps people at home. Answer in one or two short sentences, and \
only about what is asked. You teach five kinds of bread: a white loaf, a rye loaf, a sourdough, a \
flat bread and a sweet braid with raisins. For every kind you know how much flour, water, salt and \
yeast it takes, how long the dough has to rest, and how hot the oven must be. A white loaf rests \
for two hours and is baked at two hundred and twenty degrees. A rye loaf takes a starter that was \
fed the evening before, and is baked longer and at a lower heat. A sourdough needs patience: it \
rests for a whole night in a cool place. A flat bread needs no yeast and is baked in a hot pan. A \
sweet braid is brushed with egg before it goes into the oven. You always remind people to weigh \
the flour and not to open the oven too early."""

QUESTIONS = {
    MUSEUM: (
        (
            "I am planning a visit with my two children, who are six and nine years old and like "
            "everything that moves. We come by train on Saturday morning, want to stay for about "
            "two hours, and then have lunch somewhere near. At home we read about dams. What is a "
            "penstock?",
            "Where in the museum can I see one?",
            "May my children touch it?",
        ),
        (
            "I am a student of engineering and write a paper about old machines for small rivers. "
            "I have read two books about it, but I have never seen such a machine from near, and I "
            "would like to draw one and to take some pictures of its blades. What is a turbine?",
            "Which turbines do you have?",
            "Who gave you the last of them?",
        ),
        (
            "My grandmother worked in a mill when she was young, and next week is her birthday. "
            "She is eighty-four years old and walks slowly, so we will need a place to sit down, "
            "and we would like to come when it is quiet. When are you open?",
            "How much is a ticket?",
            "Is there something to eat?",
        ),
        (
            "We are a class of twenty-four pupils with two teachers. We have talked about rivers, "
            "about rain, and about what people did before there was electricity, and every pupil "
            "has written down one question for you. How old is the mill wheel?",
            "Does it still turn?",
            "What is a weir?",
        ),
    ),
    BAKERY: (
        (
            "I have just moved into my first flat. In my kitchen there is a small oven, a bowl, a "
            "wooden spoon and a scale, but no machine, and I have never made a dough before in my "
            "life. On Sunday my parents come for breakfast. Which bread is good for a beginner?",
            "How hot must the oven be?",
            "How long does it rest?",
        ),
        (
            "A neighbour gave me a glass with a grey paste in it and told me to feed it every day "
            "with flour and water. It smells a little like apples and makes bubbles, and I do not "
            "dare to throw it away, but I have no idea what to do with it. What is a sourdough?",
            "How long does it rest?",
            "Why does it taste sour?",
        ),
        (
            "We are on a camping trip in the mountains with a gas stove, one pan, a bag of flour, "
            "some salt and oil. The next shop is a day away, there is nothing left that would make "
            "a dough rise, and everybody is hungry. Which bread needs no yeast?",
            "How do I bake it?",
            "What goes well with it?",
        ),
        (
            "For the birthday of my daughter I want to bake something that looks as if it came "
            "from a shop. She likes raisins and everything sweet, but no chocolate, and there will "
            "be twelve children at the table. What is a sweet braid?",
            "Why is it brushed with egg?",
            "What is in it?",
        ),
    ),
}
"""First questions are long, and later turns repeat them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One conversation: its system prompt and the user's questions."""

    name: str
    system: str
    questions: tuple[str, ...]

    def messages(self, answers: tuple[str, ...]) -> list[dict[str, str]]:
        """The messages of the next turn, after the given answers."""
        said = [{"role": "system", "content": self.system}]
        for question, answer in zip(self.questions, answers, strict=False):
            said += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        return [*said, {"role": "user", "content": self.questions[len(answers)]}]


CHATS_MAX = sum(len(asked) for asked in QUESTIONS.values())
TURNS_MAX = 3


def chats(count: int, *, turns: int) -> list[Chat]:
    """`count` conversations, the two system prompts in turn.

    Raises `ValueError`: there are not that many.
    """
    if not 1 <= count <= CHATS_MAX:
        raise ValueError(f"chats is {count}, must be from 1 to {CHATS_MAX}")
    if not 1 <= turns <= TURNS_MAX:
        raise ValueError(f"turns is {turns}, must be from 1 to {TURNS_MAX}")
    names = {MUSEUM: "museum", BAKERY: "bakery"}
    rows = max(len(asked) for asked in QUESTIONS.values())
    found = [
        Chat(
            name=f"{names[system]} {number + 1}",
            system=system,
            questions=asked[number][:turns],
        )
        for number in range(rows)
        for system, asked in QUESTIONS.items()
    ]
    return found[:count]
