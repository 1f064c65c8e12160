"""The built-in rewards by name; each is imported when it is first looked up."""

from typing import Any

from flow_grpo.config.registry import Registry

IMAGE_REWARDS = {
    "aesthetic": "flow_grpo.rewards.scorers.clip:Aesthetic",
    "aesthetic_v25": "flow_grpo.rewards.scorers.aesthetic_siglip:AestheticV25",
    "audio_loudness": "flow_grpo.rewards.scorers.audio:AudioLoudness",
    "audio_silence": "flow_grpo.rewards.scorers.audio:AudioSilence",
    "audio_sync": "flow_grpo.rewards.scorers.audio:AudioSync",
    "clap": "flow_grpo.rewards.scorers.clap:Clap",
    "clipscore": "flow_grpo.rewards.scorers.clip:ClipScore",
    "deqa": "flow_grpo.rewards.scorers.deqa:DeQA",
    "editreward": "flow_grpo.rewards.scorers.editreward:EditReward",
    "editscore": "flow_grpo.rewards.judges.edit_score:EditScore",
    "geneval": "flow_grpo.rewards.scorers.geneval:GenEval",
    "geneval2": "flow_grpo.rewards.scorers.geneval2:GenEval2",
    "hpsv2": "flow_grpo.rewards.scorers.clip:HpsV2",
    "hpsv3": "flow_grpo.rewards.scorers.hpsv3:HpsV3",
    "human": "flow_grpo.rewards.judges.human:HumanVotes",
    "imagereward": "flow_grpo.rewards.scorers.imagereward:ImageReward",
    "jpeg_compressibility": "flow_grpo.rewards.scorers.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "flow_grpo.rewards.scorers.jpeg:jpeg_incompressibility",
    "keep_source": "flow_grpo.rewards.scorers.keep_source:KeepSource",
    "motion_smoothness": "flow_grpo.rewards.scorers.motion:MotionSmoothness",
    "moving_shape": "flow_grpo.rewards.scorers.moving_shape:MovingShape",
    "mps": "flow_grpo.rewards.scorers.mps:Mps",
    "ocr": "flow_grpo.rewards.scorers.ocr:OcrScorer",
    "pickscore": "flow_grpo.rewards.scorers.clip:PickScore",
    "qalign": "flow_grpo.rewards.scorers.deqa:QAlign",
    "qwenvl": "flow_grpo.rewards.judges.qwen_vl:QwenVl",
    "qwenvl_ocr": "flow_grpo.rewards.judges.qwen_vl:QwenVlOcr",
    "temporal_flicker": "flow_grpo.rewards.scorers.motion:TemporalFlicker",
    "unifiedreward": "flow_grpo.rewards.judges.unified_reward:UnifiedReward",
    "unifiedreward_pair": "flow_grpo.rewards.judges.unified_reward_pair:UnifiedRewardPair",
    "video_motion": "flow_grpo.rewards.scorers.motion:VideoMotion",
    "videoalign": "flow_grpo.rewards.scorers.videoalign:VideoAlign",
    "viescore": "flow_grpo.rewards.judges.vie_score:VieScore",
    "vlm_pairwise": "flow_grpo.rewards.judges.pairwise:VlmPairwise",
}
TEXT_REWARDS = {
    "answer_format": "flow_grpo.rewards.text:AnswerFormat",
    "choice": "flow_grpo.rewards.text:Choice",
    "environment": "flow_grpo.rewards.text:EnvironmentReward",
    "math_answer": "flow_grpo.rewards.text:MathAnswer",
    "overlong": "flow_grpo.rewards.text:Overlong",
    "prompt_length": "flow_grpo.rewards.text.prompt_guards:PromptLength",
    "prompt_similarity": "flow_grpo.rewards.text.prompt_guards:PromptSimilarity",
    "reward_model": "flow_grpo.rewards.text.reward_model:RewardModel",
}
# Built in, and computed elsewhere: their option `url` is what `reward_servers` has for them.
OWN_CLIENTS = ("human",)
REWARDS: Registry[Any] = Registry("reward", dict(sorted({**IMAGE_REWARDS, **TEXT_REWARDS}.items())))
