// What is on the page: messages, figures, states.

export const element = (id) => document.getElementById(id);
const log = element("log");

function show(node) {
  element("empty")?.remove();
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  log.append(node);
  if (atEnd) scrollToEnd();
}

function scrollToEnd() {
  log.scrollTop = log.scrollHeight;
}

export function addMessage(role, text, spoken = false) {
  const node = document.createElement("div");
  node.className = `message ${role}${spoken ? " spoken" : ""}`;
  const who = document.createElement("span");
  who.className = "hidden";
  who.textContent = role === "user" ? "You: " : "Answer: ";
  const body = document.createElement("span");
  body.className = "body";
  body.textContent = text;
  node.append(who, body);
  show(node);
  return node;
}

// An answer that grows; screen readers read it when it is complete.
export function addAnswer() {
  const node = addMessage("assistant", "");
  node.setAttribute("aria-busy", "true");
  return {
    append(text) {
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      node.querySelector(".body").append(text);
      if (atEnd) scrollToEnd();
    },
    finish(note = "") {
      node.setAttribute("aria-busy", "false");
      if (note && !node.querySelector(".note")) {
        const line = document.createElement("span");
        line.className = "note";
        line.textContent = note;
        node.append(line);
      }
    },
  };
}

export function showFigures(figures) {
  for (const [id, text] of Object.entries(figures)) element(id).textContent = text;
}

export function showStatus(text) {
  element("status").textContent = text;
}

export function showProblem(text) {
  element("problem").textContent = text;
  element("problem").hidden = !text;
}

// Resolves to the key that was typed.
export function askForKey() {
  const dialog = element("key-dialog");
  dialog.showModal();
  return new Promise((resolve) => {
    element("key-form").onsubmit = () => resolve(element("key").value.trim());
    dialog.oncancel = (event) => event.preventDefault();
  });
}
