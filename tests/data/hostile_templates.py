"""Templates that compute for ever or fill the memory unless their work is limited."""

GROW = "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = X %}{% endfor %}"
LONG = "{% set s = 'a' * 9999999 %}"
COSTLY = {
    "a power": "{{ 9**(9**9) }}",
    "a power in a branch": "{% if messages %}{{ 9**(9**9) }}{% endif %}",
    "powers of powers": GROW.replace("'a'", "3").replace("X", "ns.s * ns.s"),
    "a repeated text": "{{ 'a' * (6*10**9) }}",
    "a text repeated": "{{ (6*10**9) * 'a' }}",
    "a repeated list": "{{ [1] * (6*10**9) }}",
    "nested loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a filtered loop": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}"
    "{% endfor %}",
    "a recursive loop": "{% for a in [[]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "recursive macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}"
    "{% endmacro %}{{ f(90) }}",
    "endless macros": "{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
    "doubled texts": GROW.replace("X", "ns.s ~ ns.s"),
    "added texts": GROW.replace("X", "ns.s + ns.s"),
    "nested lists": GROW.replace("X", "[ns.s, ns.s]") + "{{ ns.s }}",
    "blocks": GROW.replace("X %}", "x %}").replace("{% set ns.s = x", "{% set x %}{{ ns.s }}"
    "{{ ns.s }}{% endset %}{% set ns.s = x"),
    "many texts": LONG + "{{ " + "~".join(["s"] * 9000) + " }}",
    "kept texts": "{% set ns = namespace(l=[]) %}{% for a in range(99999) %}"
    "{% set ns.l = ns.l + ['a' * 99999] %}{% endfor %}",
    "a list as a text": "{% macro f() %}{% set l = ['a'] * 9999 %}{% for a in range(99999) %}"
    "{{ l|string }}{% endfor %}{% endmacro %}{{ f() }}",
    "a long text": "{% for a in range(99999) %}" + "b" * 9999 + "{% endfor %}",
    "a wide text": "{{ 'a'.ljust(10**10) }}",
    "a wide filter": "{{ 'a'|center(10**10) }}",
    "a mapped filter": "{{ range(99999)|map('center', 10000)|list }}",
    "a fetched method": "{{ ('a'|attr('zfill'))(10**10) }}",
    "a subscribed method": "{{ 'a'['rjust'](10**10) }}",
    "an indented text": "{{ 'a\nb'|indent(10**10) }}",
    "a rounded number": "{{ 1.5|round(10**10, 'ceil') }}",
    "slices": "{{ [1]|slice(10**10)|list }}",
    "batches": "{{ [1]|batch(10**10, 0)|list }}",
    "a format": "{{ '%9999999999d' % 5 }}",
    "a format with its width": "{{ '%*d' % (10**10, 5) }}",
    "a format with a name": "{{ '%(a)9999999999d' % {'a': 5} }}",
    "a precise format": "{{ '%.9999999999f'|format(5) }}",
    "a format method": "{{ '{:>9999999999}'.format(5) }}",
    "nested formats": "{{ '{:>{}}'.format(5, 10**10) }}",
    "a format of a mapping": "{{ '{a:>9999999999}'.format_map({'a': 5}) }}",
    "a long separator": "{{ ('a' * 9999999).join(range(9999)|map('string')) }}",
    "a separator filter": "{{ range(9999)|map('string')|join('a' * 9999999) }}",
    "replacements": LONG + "{{ s.replace('', s) }}",
    "a replacing filter": LONG + "{{ s|replace(old='a', new=s) }}",
    "stripping": LONG + "{{ s.strip('b' * 999999 ~ 'a') }}",
    "trimming": LONG + "{{ s|trim('b' * 999999 ~ 'a') }}",
    "searching": LONG + "{{ s.rfind('b' ~ 'a' * 999999) }}",
    "indented JSON": "{{ [[1]]|tojson(indent=10**10) }}",
    "a large number": "{{ ('f' * 999999)|int(base=16) }}",
    "nested parentheses": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "nested branches": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "nested blocks": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "a long sum": "{{ " + "+".join(["1"] * 30000) + " }}",
    "a long template": "a" * 200_000 + "{{ 1 }}",
    "a date": "{{ strftime_now('%Y' * 99999) }}",
}  # fmt: skip
"""Templates by what is costly in them; each exceeds a limit, whatever it is given."""
FORBIDDEN = {
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "translations": "{{ 'a'.translate({97: 'b' * 9}) }}",
    "random text": "{{ lipsum(10**9) }}",
    "attributes": "{{ {}|xmlattr }}",
    "many digits": "{{ " + "9" * 6000 + " }}",
}
"""Templates that are refused for another reason than a limit."""
CHEAP = {
    "{{ 2**10 }} {{ 2**-1 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ '-' * 3 }}": "1024 0.5 3 1 ---",
    "{{ '%s is %d' % ('a', 5) }} {{ '{}: {}'.format('a', 1700000000) }}": "a is 5 a: 1700000000",
    "{{ '%5.1f|' | format(2.25) }}{{ 'a'|center(3) }}|{{ 'a'.ljust(2) }}": "  2.2| a |a ",
    "{% for a, b in {'x': 1}|items %}{{ a }}{{ loop.last }}{{ loop.length }}{% endfor %}": "xTrue1",
    "{% for x in [1, 2] %}{{ loop.revindex }}{{ loop.nextitem }}{% endfor %}": "221",
    "{{ range(3)|map('string')|join(', ') }} {{ 'a'.join(['b', 'c']) }}": "0, 1, 2 bac",
    "{{ [1, [2, (3,)], {'a': none}] }} {{ missing }}": "[1, [2, (3,)], {'a': None}] ",
    "{% autoescape true %}{{ '<' ~ '>' }}{% endautoescape %}": "&lt;&gt;",
    "{% for a in [[[]]] recursive %}({{ loop(a) }}){% endfor %}": "(())",
    "{{ 'x<think>y</think>z'.split('</think>')[-1].strip('z\n') }}|": "|",
    "{{ messages[0]['content'] ~ messages[1:]|length }}": "hello0",
    "{{ {'a': [1]}|tojson(indent=1) }}": '{\n "a": [\n  1\n ]\n}',
}
"""Templates with what they render."""
