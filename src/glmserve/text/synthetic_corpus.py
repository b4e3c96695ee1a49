# SPDX-License-Identifier: Apache-2.0
"""A short English, Chinese and code text from which synthetic tokenizers learn their merges.

Data only, written for this purpose. It repeats common words so that ordinary text compresses.
"""

CORPUS = """\
The quick answer is that the model reads the text and then writes the next word, one at a time.
What is the weather in Oslo today? The weather in Oslo is cold and clear, with some wind from the north.
Please write a short letter to the team and tell them that the work on the server is done.
There are three things that you should know about this: the first is time, the second is space.
It was a long day, and they were all happy when the train came into the station in the evening.
If you want to find the number of people in the city, you have to count the houses in each street.
We think that this is not the right way to do it, because the result would be wrong for most of the users.
Hello, how are you? I am fine, thank you. Can you help me with a question about the following function?
Let me check. I will look it up and come back with the answer in a moment. One, two, three, four, five, six, seven.
The children are playing in the garden while their mother is reading a book about the history of the world.
To be able to learn a language you need to speak it, hear it, read it and write it every day for some years.
Reasoning Effort: Max. Reasoning Effort: High. Reasoning Effort: Low. You may call one or more functions.
You are provided with function signatures within tools tags: for each function call, output the function name.
This is an example of a sentence that has no meaning other than to show which letters follow each other often.
She said that he had been there before, but he could not remember the name of the place or of the river.
First we need the data, then we can make the plan; after that, everything should be simple and quick.
The price of the house went up again this year, which is why they decided to move out of the country.
When the sun rises over the mountains, the light comes through the window and the room becomes warm.
In the beginning there was nothing; in the end there was everything, and nobody knew where it came from.
Yes, that would be great. No, I do not think so. Maybe we should ask someone who knows more about it.
Water is made of hydrogen and oxygen. The earth moves around the sun in about three hundred and sixty five days.
An engine, a page table, a request and a token: the scheduler sends each step to every rank and waits for it.
The user asked for the temperature in degrees, the assistant called the tool and gave the result as text.
Good morning! Good evening! Good night! See you tomorrow, and have a nice weekend with your family and friends.
你好,请问今天的天气怎么样?今天天气很好,我们可以一起去公园。
我们是中国的学生,我们在学习中文。他们的老师说中文很有意思。
这个问题的答案是四。请你再想一想,然后告诉我你的结果。
一个人在家里看书,一个人在外面工作,大家都很高兴。
先算一下,再回答。不是这样的,应该是那样的。谢谢你的帮助!
时间和空间是什么?这是一个很大的问题,没有人知道答案。
北京是中国的首都,上海是中国最大的城市。我想去北京和上海。
模型可以使用工具来回答用户的问题,也可以直接回答。
def main(args: list[str]) -> int:
    for index, value in enumerate(args):
        if value is None:
            raise ValueError("value is None")
        print(index, value)
    return 0
class Request:
    def __init__(self, name: str, text: str, number: int = 0) -> None:
        self.name = name
        self.text = text
        self.number = number
    def size(self) -> int:
        return len(self.text) + len(self.name)
import json
import numpy as np
with open("data.json", "r", encoding="utf-8") as file:
    data = json.load(file)
result = [item for item in data if item["type"] == "function"]
x = np.zeros((16, 32), dtype=np.float32)
y = x + 1.0 if x.shape[0] > 0 else x - 1.0
{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
{"name": "get_weather", "description": "Forecast for a city", "parameters": {"type": "object", "properties": {}}}
{"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {"query": "text", "limit": 10}}}
[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello! How can I help you today?"}]
int main(void) { for (int i = 0; i < 10; i++) { printf("%d\\n", i); } return 0; }
const result = await fetch("https://example.com/api/v1/items?limit=10").then((response) => response.json());
SELECT name, count(*) FROM users WHERE city = 'Oslo' GROUP BY name ORDER BY count(*) DESC LIMIT 10;
<div class="main"><a href="index.html">Home</a><p>Text</p></div>
$ git add src && git commit -m "Add the first test" && make test
| name | value | unit |
| --- | --- | --- |
| speed | 100 | ms |
# Title

## First part

- one item
- another item

1. Read the text.
2. Write the answer.
"""
