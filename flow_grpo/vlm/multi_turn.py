"""Multi-turn episodes between a model and an environment.

In every turn, the conversation so far is the prompt of the next response. Only sampled tokens are
trained; observation tokens are masked out.
"""

from dataclasses import dataclass, field
from functools import partial

import torch

from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed
from flow_grpo.vlm.environment import EnvironmentPool, StepRequest, StepResult
from flow_grpo.vlm.packing import Conversation
from flow_grpo.vlm.prompts import EncodedPrompt
from flow_grpo.vlm.rollout import EpisodeRecord, RolloutEngine, Sample


@dataclass
class Episode:
    """State of one episode: its question, the conversation so far, and the rewards of its steps."""

    number: int  # within its batch
    row: int  # of the data set
    question: Question
    prompt: EncodedPrompt
    conversation: EncodedPrompt  # the prompt of the next response
    responses: list[Sample] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    response_spans: list[slice] = field(default_factory=list)  # in `conversation`
    rewards: list[float] = field(default_factory=list)
    failure: str = ""
    done: bool = False

    @property
    def response_texts(self) -> list[str]:
        return [response.text for response in self.responses]

    def add_response(self, response: Sample) -> None:
        start = len(self.conversation)
        self.response_spans.append(slice(start, start + len(response.tokens)))
        self.responses.append(response)

    def to_sample(self, conversation: EncodedPrompt) -> Sample:
        """Return all responses as one sample; `conversation` includes the last one."""
        sampled = torch.zeros(len(conversation), dtype=torch.bool)
        for span in self.response_spans:
            sampled[span] = True
        start, num_prompt_images = len(self.prompt), len(self.prompt.vision_inputs)
        return Sample(
            self.row,
            torch.cat([response.tokens for response in self.responses]),
            torch.cat([response.log_probs for response in self.responses]),
            all(response.ended for response in self.responses),
            self.responses[-1].text,
            Conversation(
                conversation.ids[start:],
                conversation.positions[:, start:],
                sampled[start:],
                conversation.vision_inputs[num_prompt_images:],
                conversation.sources[num_prompt_images:],
            ),
            EpisodeRecord(
                self.response_texts,
                self.observations,
                self.rewards,
                [len(response.tokens) for response in self.responses],
                self.failure,
            ),
        )


@dataclass
class EpisodeRunner:
    """Runs batches of episodes; the rollout engine has to be in generation mode."""

    rollout_engine: RolloutEngine
    environments: EnvironmentPool
    max_turns: int
    max_observation_tokens: int

    def run(
        self,
        questions: list[Question],
        prompts: dict[int, EncodedPrompt],
        rows: list[int],
        generators: list[torch.Generator] | None = None,
    ) -> list[Sample]:
        """Run an episode for each of `rows`, decoding greedily without generators."""
        batch = self.environments.next_batch_id()
        episodes = [
            Episode(number, row, questions[row], prompts[row], prompts[row])
            for number, row in enumerate(rows)
        ]
        for turn in range(self.max_turns):
            active = [episode for episode in episodes if not episode.done]
            if not active:
                break
            self._generate_turn(active, generators, shared=turn == 0)
            requests = [
                StepRequest.from_question((batch, e.number), e.question, e.response_texts)
                for e in active
            ]
            for episode, step in zip(active, self.environments.step(requests), strict=True):
                self.apply_step(episode, step, last=turn == self.max_turns - 1)
        encoder = self.rollout_engine.encoder
        return [
            e.to_sample(encoder.append_tokens(e.conversation, e.responses[-1].tokens))
            for e in episodes
        ]

    def _generate_turn(
        self, active: list[Episode], generators: list[torch.Generator] | None, *, shared: bool
    ) -> None:
        """Sample a response per episode; if `shared`, episodes of a question have one prompt."""
        keys = [episode.row if shared else episode.number for episode in active]
        prompts = {key: episode.conversation for key, episode in zip(keys, active, strict=True)}
        if generators is not None:
            generators = [generators[episode.number] for episode in active]
        responses = self.rollout_engine.generate(prompts, keys, generators)
        for episode, response in zip(active, responses, strict=True):
            episode.add_response(response)

    def apply_step(
        self, episode: Episode, step: StepResult | Failed, *, last: bool = False
    ) -> None:
        """Append the environment's observation to the episode, or end it."""
        if isinstance(step, Failed):
            episode.done, episode.failure = True, step.reason
            return
        episode.rewards.append(step.reward)
        episode.done = step.done or last
        if episode.done:
            return
        try:
            shown = self._append_observation(episode, step)
        except UserError as error:
            episode.done, episode.failure = True, str(error)
        else:
            episode.observations.append(shown)

    def _append_observation(self, episode: Episode, step: StepResult) -> str:
        """Append an observation, or its fallback if it cannot be encoded; return its text."""
        encoder, tokens = self.rollout_engine.encoder, episode.responses[-1].tokens
        where, text, images = f"an observation for {episode.question.where}", step.text, step.images
        encode = partial(
            encoder.encode_observation,
            response=tokens,
            where=where,
            limit=self.max_observation_tokens,
            shown=len(episode.conversation.vision_inputs),
        )
        try:
            observation = encode(text, images)
        except UserError:
            if not step.fallback:
                raise
            text, images = step.fallback, ()
            observation = encode(text, images)
        episode.conversation = encoder.append_tokens(
            episode.conversation,
            torch.cat([tokens, observation.ids]),
            observation.vision_inputs,
            images,
        )
        return text
