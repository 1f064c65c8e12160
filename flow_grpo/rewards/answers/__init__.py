"""Rewards of answers: called like those of pictures, with texts in the pictures' place.

`reward(answers, questions, metadata)`, where the metadata has the truth as "answer".
"""
