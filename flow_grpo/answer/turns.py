"""Episodes: a model answers, an environment answers back, and so on, for several turns.

Every turn the conversation so far is the prompt of the next answer. What is trained are the tokens
that the model sampled; those of observations are read only.
"""

from dataclasses import dataclass, field

import torch

from flow_grpo.answer.batches import Talk
from flow_grpo.answer.environment import Environments, Move, Step
from flow_grpo.answer.prompts import EncodedPrompt
from flow_grpo.answer.rollout import Answerer, Played, Sample
from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed


@dataclass
class Episode:
    number: int  # within its batch
    row: int  # of the data set
    question: Question
    prompt: EncodedPrompt
    talk: EncodedPrompt  # the prompt and all that followed it, as the next answer reads it
    answers: list[Sample] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)  # texts of observations
    places: list[slice] = field(default_factory=list)  # of the answers, in `talk`
    reward: float = 0.0
    failure: str = ""
    over: bool = False

    def add(self, answer: Sample) -> None:
        start = len(self.talk)
        self.places.append(slice(start, start + len(answer.tokens)))
        self.answers.append(answer)

    def sample(self, talk: EncodedPrompt) -> Sample:
        """All its answers as one sample; `talk` ends with the last of them."""
        sampled = torch.zeros(len(talk), dtype=torch.bool)
        for place in self.places:
            sampled[place] = True
        start, seen = len(self.prompt), len(self.prompt.seen)
        said = [answer.text for answer in self.answers]
        return Sample(
            self.row,
            torch.cat([answer.tokens for answer in self.answers]),
            torch.cat([answer.log_probs for answer in self.answers]),
            all(answer.ended for answer in self.answers),
            said[-1],
            Talk(
                talk.ids[start:],
                talk.positions[:, start:],
                sampled[start:],
                talk.seen[seen:],
                talk.sources[seen:],
            ),
            Played(said, self.heard, self.reward, self.failure),
        )


@dataclass
class Player:
    """Plays episodes, a batch at a time, with an answerer that is awake."""

    answerer: Answerer
    environments: Environments
    max_turns: int
    max_observation_tokens: int

    def play(
        self,
        questions: list[Question],
        prompts: dict[int, EncodedPrompt],
        rows: list[int],
        generators: list[torch.Generator] | None = None,
    ) -> list[Sample]:
        """An episode for each of `rows`; without generators by the likeliest tokens."""
        batch = self.environments.new_batch()
        episodes = [
            Episode(number, row, questions[row], prompts[row], prompts[row])
            for number, row in enumerate(rows)
        ]
        for turn in range(self.max_turns):
            going = [episode for episode in episodes if not episode.over]
            if going:
                self._answer(going, generators, shared=turn == 0)
                moves = [
                    Move.of((batch, e.number), e.question, [a.text for a in e.answers])
                    for e in going
                ]
                for episode, step in zip(going, self.environments.step(moves), strict=True):
                    self.hear(episode, step, last=turn == self.max_turns - 1)
        encoder = self.answerer.encoder
        return [e.sample(encoder.followed(e.talk, e.answers[-1].tokens)) for e in episodes]

    def _answer(
        self, going: list[Episode], generators: list[torch.Generator] | None, *, shared: bool
    ) -> None:
        """Each says something; at first, episodes of one question `share` their prompt."""
        keys = [episode.row if shared else episode.number for episode in going]
        prompts = {key: episode.talk for key, episode in zip(keys, going, strict=True)}
        own = None if generators is None else [generators[e.number] for e in going]
        for episode, answer in zip(going, self.answerer.answer(prompts, keys, own), strict=True):
            episode.add(answer)

    def hear(self, episode: Episode, step: Step | Failed, *, last: bool = False) -> None:
        """What the environment answered: the episode goes on with it, or is over."""
        if isinstance(step, Failed):
            episode.over, episode.failure = True, step.reason
            return
        episode.reward += step.reward
        episode.over = step.done or last
        if episode.over:
            return
        said, where = episode.answers[-1].tokens, f"an observation for {episode.question.where}"
        try:
            heard = self.answerer.encoder.observation(
                step.text, step.pictures, said, where, self.max_observation_tokens
            )
        except UserError as error:
            episode.over, episode.failure = True, str(error)
            return
        episode.heard.append(step.text)
        episode.talk = self.answerer.encoder.followed(
            episode.talk, torch.cat([said, heard.ids]), heard.seen, step.pictures
        )
