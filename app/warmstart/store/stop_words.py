"""Words that full-text search leaves out, in the languages the index segments.

They say how a sentence is built, not what it is about; left in, they fill the
text arm's list with rows that only share a language with the query.
"""

from typing import Final

_ENGLISH: Final = """
a about after again all also am an and any are aren't as at be because been before being below between both but by
can can't cannot could couldn't did didn't do does doesn't doing don't down during each few for from further get gets got
had has hasn't have haven't having he her here hers him his how i i'm i've if in into is isn't it it's its itself just
let's me more most my myself no nor not of off on once only or other our ours out over own same she should shouldn't so
some such than that that's the their theirs them then there there's these they they're this those through to too under
until up us very was wasn't we we're we've were weren't what what's when where which while who whom why will with won't
would wouldn't you you're your yours
"""
_GERMAN: Final = """
aber alle allem allen aller alles als also am an auch auf aus bei beim bin bis bist da dabei dadurch dafür damit dann
das dass dazu dein deine dem den denn der des dessen die dies diese diesem diesen dieser dieses doch dort du durch ein
eine einem einen einer eines er es etwas euch für gegen hab habe haben hat hatte hatten hier hin hinter ich ihm ihn ihr
ihre im in ist ja jede jedem jeden jeder jedes kann kein keine keinem keinen keiner können könnte man mehr mein meine
mich mir mit muss müssen nach nicht nichts noch nun nur ob oder ohne sehr sein seine sich sie sind so soll sollen sollte
sondern um und uns unser unsere unter vom von vor war waren warum was weil welche welcher welches wenn wer werden wie
wieder wieso will wir wird wo wurde wurden während zu zum zur zwar zwischen über
"""
_ROMANCE: Final = """
au aux avec ce ces cette dans de del della des di du el elle en est et ils je la las le les los lui ma mais mes ne nos
nous o os ou para par pas per por pour qu que qui quoi sa se ses su sur te tu um una une uno vos vous y é
"""
_CHINESE: Final = """
的 了 在 是 我 你 他 她 它 我们 你们 他们 和 与 或 而 但 但是 就 都 也 还 很 把 被 让 给 对 从 到 向 为 以 及 等 这 那 这个 那个
这些 那些 一个 什么 怎么 怎样 如何 为什么 哪个 哪里 哪些 吗 呢 吧 啊 要 会 能 可以 应该 不 没 没有 有 上 下 中 里 时 之 其 所 因为 所以
如果 然后 再 又 只 会 请 后 前 用 时候
"""
_JAPANESE: Final = """
の に は を が と で も へ や から まで より など か ね よ な だ です ます した する して され さ れ た て い ある いる ない なく なる
なっ こと もの ため よう これ それ あれ この その あの どの どれ 何 なぜ どう どこ いつ とき 時 し ん れる られる でき できる という について
ませ ください また ので のか とか だけ
"""
_KOREAN: Final = (
    "이 그 저 것 수 등 및 더 또 를 을 은 는 가 에 의 로 와 과 도 에서 으로 하다 있다 없다 무엇 왜 어떻게 어디"
)
#: The index compares after stemming and folding: what becomes of some words above.
_AS_INDEXED: Final = """
al ani becaus befor cett dafur dan doe dure e ell etwa fur hatt i'v il konnen konnt konnte let mai mussen ohn onc
onli sollt they'r uber un veri wahrend we'r we'v welch whi wurd you'r
"""

STOP_WORDS: Final = frozenset(
    word for words in (_ENGLISH, _GERMAN, _ROMANCE, _CHINESE, _JAPANESE, _KOREAN, _AS_INDEXED) for word in words.split()
)
