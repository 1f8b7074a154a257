"""Scripts that solve MiniWoB++ tasks one action at a time.  They look into the page to know *where* things are, and act only
through the agent's own actions.

A script is a JavaScript expression, asked before each action: `n` counts from 0, `text` is the task in words, `quoted` what it
has in quotes.  It gives an action whose points (`coordinate`, `to`) are elements or pixels.
"""

from __future__ import annotations

from typing import Any

from megatron_webrl.browser import Page, from_pixels

HELPERS = """
const find = selector => document.querySelector(selector);
const all = selector => [...document.querySelectorAll(selector)];
const said = core.getUtterance(), text = typeof said === 'string' ? said : said.utterance;
const quoted = [...text.matchAll(/"([^"]*)"/g)].map(match => match[1]);
const shown = element => { const box = element.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
const named = (selector, name) => all(selector).find(e => shown(e) && e.textContent.trim() === name);
const click = element => ({action: 'left_click', coordinate: element});
const type = (element, what) => ({action: 'type', coordinate: element, text: what});
const left = element => { const box = element.getBoundingClientRect(); return [box.left + 10, box.top + box.height / 2]; };
const middle = element => {
  const box = element.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
};
const submit = () => click(all('#subbtn, #area button, #submit').find(shown));
const steps = (...actions) => actions[n] ?? submit();
"""
CHECKBOXES = """(() => {
  const names = /Select (.*) and click/.exec(text)[1].split(', ');
  const open = all('#boxes label').find(l => names.includes(l.textContent.trim()) && !l.querySelector('input').checked);
  return open ? click(open.querySelector('input')) : submit();
})()"""
COLLAPSIBLE = """[
  click(find('#area h3')), {action: 'wait', time: 0.3}, submit()][Math.min(n, 2)]"""
SCRIPTS = {
    "click-test": "click(find('#subbtn'))",
    "click-test-2": "click(find('#subbtn'))",
    "click-button": "click(named('#area button', quoted[0]))",
    "click-dialog": "click(find('.ui-dialog-titlebar button.ui-button'))",
    "click-dialog-2": "click(quoted[0] === 'x' ? find('.ui-dialog-titlebar button.ui-button')"
    " : named('.ui-dialog-buttonset button', quoted[0]))",
    "focus-text": "({action: 'right_click', coordinate: find('#tt')})",
    "focus-text-2": "({action: 'double_click', coordinate: find('#tt' + /the (\\d)/.exec(text)[1])})",
    "enter-text": "steps(type(find('#tt'), quoted[0]))",
    "enter-text-dynamic": "steps(type(find('#tt'), quoted[0]))",
    "enter-text-2": "steps(type(find('#tt'), /upper/.test(text) ? quoted[0].toUpperCase() : quoted[0].toLowerCase()))",
    "login-user": "steps(type(find('#username'), quoted[0]), type(find('#password'), quoted[1]))",
    "enter-password": "steps(type(find('#password'), quoted[0]), type(find('#verify'), quoted[0]))",
    "enter-date": "steps(click(left(find('#tt'))), {action: 'type', text: /[\\d/]{10}/.exec(text)[0].replaceAll('/', '')})",
    "enter-time": """(() => {
      const [, hours, minutes, half] = /(\\d+):(\\d+) ?([AP]M)/i.exec(text);
      return steps(click(left(find('#tt'))), {action: 'type', text: hours.padStart(2, '0') + minutes + half});
    })()""",
    "click-link": "click(named('.alink', quoted[0]))",
    "click-tab": 'click(find(`a[href="#tabs-${/#(\\d)/.exec(text)[1]}"]`))',
    "click-option": "steps(click(all('#boxes label').find(l => l.textContent.trim() === /Select (.*) and/.exec(text)[1])"
    ".querySelector('input')))",
    "click-checkboxes": CHECKBOXES,
    "click-checkboxes-transfer": CHECKBOXES,
    "use-spinner": """(() => {
      const wanted = Number(/Select (-?\\d+)/.exec(text)[1]), now = Number(find('#spinner').value);
      return now === wanted ? submit() : click(find(now < wanted ? '.ui-spinner-up' : '.ui-spinner-down'));
    })()""",
    "click-collapsible": COLLAPSIBLE,
    "click-collapsible-nodelay": COLLAPSIBLE,
    "click-color": 'click(find(`#area .color[data-color="${/the (\\w+) col/.exec(text)[1]}"]`))',
    "scroll-text": """steps({action: 'scroll', direction: 'down', coordinate: find('#text-area')},
      type(find('#answer-input'), find('#text-area').value.trim().split(/\\s/).pop().replace('.', '')))""",
    "text-transform": "steps(type(find('#tt'), find('#captcha').textContent.trim()))",
    "simple-arithmetic": """steps(type(find('#math-answer'), String(eval(
      find('#math-problem').textContent.replace(/[x×]/, '*').replace(/=.*/, '')))))""",
    "unicode-test": "click(named('#area button', quoted[0]))",
    "click-button-sequence": "click(find(n ? '#subbtn2' : '#subbtn'))",
    "copy-paste": """steps(click(find('#to-copy')), {action: 'key', keys: ['ctrl', 'a']}, {action: 'key', keys: ['ctrl', 'c']},
      click(find('#answer-input')), {action: 'key', keys: ['ctrl', 'v']})""",
    "highlight-text": """(() => {
      const range = document.createRange();
      range.selectNodeContents(find('#randomText'));
      const lines = [...range.getClientRects()], first = lines[0], last = lines.at(-1);
      return steps({action: 'drag', coordinate: [first.left, first.top + first.height / 2],
                    to: [last.right + 3, last.top + last.height / 2]});
    })()""",
    "drag-box": "steps({action: 'drag', coordinate: find('#draggableSmall'), to: find('#draggableLarge')})",
    "drag-circle": """(() => {
      const [x, y] = middle(find('circle')), way = /circle (\\w+)/.exec(text)[1];
      const [dx, dy] = {up: [0, -25], down: [0, 25], left: [-25, 0], right: [25, 0]}[way];
      return steps({action: 'mouse_move', coordinate: [x, y]}, {action: 'drag', to: [x + dx, y + dy]});
    })()""",
    "choose-list": """steps(click(find('#area select')), {action: 'type', text: /Select (.*) from/.exec(text)[1]},
      {action: 'key', keys: ['Enter']})""",
    "use-slider": """(() => {
      const wanted = Number(/Select (-?\\d+)/.exec(text)[1]), now = Number(find('#val').textContent);
      const option = name => $('#slider').slider('option', name), box = find('#slider').getBoundingClientRect();
      const x = box.left + box.width * (wanted - option('min')) / (option('max') - option('min'));
      if (now === wanted) return submit();
      if (!n) return {action: 'drag', coordinate: find('.ui-slider-handle'), to: [x, box.top + box.height / 2]};
      return {action: 'key', keys: [now < wanted ? 'right' : 'left']};
    })()""",
    "navigate-tree": """(() => {
      const wanted = all('#tree span').find(e => e.textContent.trim() === quoted[0]);
      let target = wanted;
      for (let li = wanted.parentElement; li.id !== 'tree'; li = li.parentElement)
        if (li.tagName === 'LI' && !shown(target)) target = li.querySelector('span');
      return click(left(target));
    })()""",
    "read-table": """steps(type(find('#tt'),
      all('#tab td').find((td, i, cells) => cells[i - 1]?.textContent.trim() === /value of (.*) into/.exec(text)[1])
        .textContent.trim()))""",
    "circle-center": "steps(click(middle(all('circle').at(-1))))",
}
MOST_STEPS = 20


async def next_action(page: Page, name: str, n: int) -> dict[str, Any]:
    """The n-th action of the script, for the page as it is now."""
    action: dict[str, Any] = await page.evaluate(
        f"([n]) => {{ {HELPERS} const action = ({SCRIPTS[name]});"
        "for (const key of ['coordinate', 'to'])"
        "  if (action[key] instanceof Element) action[key] = middle(action[key]);"
        "return action; }",
        [n],
    )
    return {k: from_pixels(v, page.view) if k in ("coordinate", "to") else v for k, v in action.items()}
