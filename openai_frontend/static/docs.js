// Swagger UI, from a package that the frontend brings along, over our own description of the API.
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null, // no look-ups elsewhere
});
