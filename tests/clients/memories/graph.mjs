// Writes a graph with the reference memory server's own code: node graph.mjs FILE
import { KnowledgeGraphManager } from "@modelcontextprotocol/server-memory/dist/index.js";

const graph = new KnowledgeGraphManager(process.argv[2]);
await graph.createEntities([
  { name: "Billing service", entityType: "service", observations: ["Written in Go", "Numbers invoices by a sequence"] },
  { name: "Ada", entityType: "person", observations: ["Prefers tabs"] },
  { name: "日本語", entityType: "topic", observations: [] },
]);
await graph.createRelations([
  { from: "Ada", to: "Billing service", relationType: "maintains" },
  { from: "Ledger", to: "Billing service", relationType: "feeds" },
]);
await graph.addObservations([{ entityName: "Ada", contents: ["Is on call on Mondays"] }]);
process.exit(0); // its server waits for stdin
